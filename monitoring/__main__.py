"""Write the generated files: dashboards, rules and docs/metrics.md."""

from monitoring.generated import REPOSITORY, files


def main() -> None:
    """Write the files that differ."""
    for path, content in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text() == content:
            continue
        path.write_text(content)
        print(f"wrote {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
