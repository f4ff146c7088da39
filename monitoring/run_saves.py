"""Panels of the dashboard *Run* about saves: checkpoints, and the volume that holds them."""

from monitoring.panels import Part, Query, heat, line, row
from monitoring.run_queries import THIS, WINDOW, increase, mean, quantiles, value


def checkpoints() -> list[Part]:
    """Panels about the duration and results of saves."""
    commit = "trainsync_checkpoint_commit_seconds"
    return [
        row("Checkpoints"),
        line(
            "Commits and aborts",
            "Saves that ended, in ten minutes. An abort keeps the commits before it. A late "
            "part came after the commit of a save that did not name it: register all "
            "participants. Set aside: the bytes of a committed checkpoint had changed. A copy to "
            "the mirror that failed is tried again.",
            "none",
            Query(increase("trainsync_checkpoint_commits_total", "kind"), "{{kind}} committed"),
            Query(
                increase("trainsync_checkpoint_aborts_total", "kind,cause") + " > 0",
                "{{kind}} aborted: {{cause}}",
            ),
            Query(
                increase("trainsync_checkpoint_rescued_parts_total", "kind") + " > 0",
                "{{kind}} part written from memory after a death",
            ),
            Query(
                increase("trainsync_checkpoint_late_parts_total", "kind") + " > 0",
                "{{kind}} lacks a late part",
            ),
            Query(
                f"sum (increase(trainsync_checkpoint_set_aside_total{{{THIS}}}[{WINDOW}])) > 0",
                "checkpoint set aside",
            ),
            Query(
                f"sum (increase(trainsync_checkpoint_mirror_failures_total{{{THIS}}}[{WINDOW}]))"
                " > 0",
                "copy to the mirror failed",
            ),
            style="bars",
        ),
        line(
            "Commit latency",
            "From the registration of a save to its commit.",
            "s",
            *quantiles(commit, "kind,"),
        ),
        heat(
            "Commit latency, all of them",
            "How many commits took how long.",
            Query(f"sum by (le) (increase({commit}_bucket{{{THIS}}}[{WINDOW}]))"),
        ),
        line(
            "Loads to resume",
            "Bytes that all ranks read by load_sharded in ten minutes, from the memory of the "
            "trainers' pods and from the volume or the bucket.",
            "bytes",
            Query(increase("trainsync_checkpoint_loaded_bytes_total", "source"), "from {{source}}"),
            style="bars",
        ),
        line(
            "Mirror",
            "Bytes a second that are sent to the bucket of checkpoint.mirror.",
            "binBps",
            Query(
                f"sum (rate(trainsync_checkpoint_mirror_bytes_total{{{THIS}}}[{WINDOW}]))", "sent"
            ),
        ),
        line(
            "Time of a copy to the mirror",
            "From the first byte of a step to its commit in the bucket.",
            "s",
            *quantiles("trainsync_checkpoint_mirror_seconds"),
        ),
        line(
            "Training blocked, a save",
            "How long training stood still for a save: all parts of its slowest rank.",
            "s",
            *quantiles("trainsync_checkpoint_save_blocked_seconds", "kind,"),
        ),
        line(
            "Where a part's time goes",
            "Means of one participant's part: training blocked, waiting for staging memory (a part "
            "of that), waiting to be written, written. Only the first two hold training up.",
            "s",
            Query(mean("trainsync_checkpoint_blocked_seconds"), "blocked {{kind}}"),
            Query(mean("trainsync_checkpoint_slot_wait_seconds"), "waited for memory {{kind}}"),
            Query(mean("trainsync_checkpoint_queue_wait_seconds"), "waited {{kind}}"),
            Query(mean("trainsync_checkpoint_write_seconds"), "written {{kind}}"),
        ),
        line(
            "Bytes",
            "Staged: copied out of live state. Written: to the volume or the bucket. Kept: not"
            " written again, as an older step has them. By saves that ended.",
            "Bps",
            Query(
                "sum by (kind) "
                f"(rate(trainsync_checkpoint_written_bytes_total{{{THIS}}}[{WINDOW}]))",
                "written {{kind}}",
            ),
            Query(
                f"sum by (kind) (rate(trainsync_checkpoint_kept_bytes_total{{{THIS}}}[{WINDOW}]))",
                "kept {{kind}}",
            ),
            Query(
                "sum by (kind) "
                f"(rate(trainsync_checkpoint_staged_bytes_total{{{THIS}}}[{WINDOW}]))",
                "staged {{kind}}",
            ),
        ),
    ]


def volume() -> list[Part]:
    """Panels about open saves, kept checkpoints and free space."""
    oldest = value("trainsync_checkpoint_oldest_in_flight_timestamp_seconds")
    return [
        row("Volume"),
        line(
            "Saves in flight",
            "Registered and neither committed nor aborted, and how long the oldest has been open.",
            "none",
            Query(value("trainsync_checkpoint_in_flight"), "open saves"),
            Query(f"time() - {oldest}", "oldest, seconds"),
            style="steps",
        ),
        line(
            "Room on the volume",
            "The file system of the run's directory, and the size of the newest checkpoint.",
            "bytes",
            Query(value("trainsync_volume_available_bytes"), "free"),
            Query(value("trainsync_volume_capacity_bytes"), "size"),
            Query(value("trainsync_checkpoint_last_committed_bytes", also="kind"), "{{kind}}"),
        ),
        line(
            "Kept steps and their readers",
            "Committed saves on the volume, readers that hold one, and writers with a permit.",
            "none",
            Query(value("trainsync_checkpoint_retained", also="kind"), "kept {{kind}}"),
            Query(value("trainsync_checkpoint_reader_leases"), "readers"),
            Query(value("trainsync_checkpoint_permits_held"), "writing"),
            Query(value("trainsync_checkpoint_permits_waiting"), "waiting to write"),
            style="steps",
        ),
    ]
