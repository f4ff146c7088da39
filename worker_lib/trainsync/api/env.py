"""Environment variables that the operator puts into pods and jobs, and the library reads.

The operator sets them in the first container of a GPU pod; some of them in the monitor's, and in
the agent's beside an inference server. A user sets ``RANK`` and ``WORLD_SIZE``, and for verl the
variables of `trainsync.integrations.verl.saving` and ``TRAINSYNC_VERL_TOTAL_STEPS``.
"""

from typing import Final

RUN_NAME: Final = "TRAINSYNC_RUN_NAME"
RUN_NAMESPACE: Final = "TRAINSYNC_RUN_NAMESPACE"
RUN_UID: Final = "TRAINSYNC_RUN_UID"
CLUSTER: Final = "TRAINSYNC_CLUSTER"
# The cluster of the trainers, where explorers are in another one.
TRAINER_CLUSTER: Final = "TRAINSYNC_TRAINER_CLUSTER"
GROUP: Final = "TRAINSYNC_GROUP"
ROLE: Final = "TRAINSYNC_ROLE"
# In a pod: the attempt that made its RayCluster. In a job (through its runtime environment): the
# job's attempt, which wins because Ray's job variables override those of the pod.
ATTEMPT: Final = "TRAINSYNC_ATTEMPT"
# "true": the job is asked for warm spares. Set in the job's runtime environment, like its attempt.
WARM_SPARE: Final = "TRAINSYNC_WARM_SPARE"
POD_REPLACEMENT_SECONDS: Final = "TRAINSYNC_POD_REPLACEMENT_SECONDS"
# Set by RunContext.env() for the processes that a claimed job starts; never by the operator.
INCARNATION: Final = "TRAINSYNC_INCARNATION"
# A process's rank for its coordinator; takes precedence over RANK and WORLD_SIZE, which torchrun
# and verl set.
RANK: Final = "TRAINSYNC_RANK"
WORLD_SIZE: Final = "TRAINSYNC_WORLD_SIZE"
MONITOR_URL: Final = "TRAINSYNC_MONITOR_URL"
TOKEN_FILE: Final = "TRAINSYNC_TOKEN_FILE"
# The run's directory: the mount point joined with spec.checkpoint.path; or the URL of its bucket.
CHECKPOINT_DIR: Final = "TRAINSYNC_CHECKPOINT_DIR"
CHECKPOINT_INTERVAL: Final = "TRAINSYNC_CHECKPOINT_INTERVAL"
CHECKPOINT_MAX_TO_KEEP: Final = "TRAINSYNC_CHECKPOINT_MAX_TO_KEEP"
CHECKPOINT_SAVE_STRATEGY: Final = "TRAINSYNC_CHECKPOINT_SAVE_STRATEGY"
CHECKPOINT_VERIFY: Final = "TRAINSYNC_CHECKPOINT_VERIFY"
CHECKPOINT_SAVE_TIMEOUT: Final = "TRAINSYNC_CHECKPOINT_SAVE_TIMEOUT_SECONDS"
# "true": states that have not changed are not written again.
CHECKPOINT_INCREMENTAL: Final = "TRAINSYNC_CHECKPOINT_INCREMENTAL"
# Bytes of shards that a pod's ranks keep in memory; where, /dev/shm without; and how many copies
# lie with a neighbour, 0 or 1.
CHECKPOINT_MEMORY: Final = "TRAINSYNC_CHECKPOINT_MEMORY"
CHECKPOINT_MEMORY_DIR: Final = "TRAINSYNC_CHECKPOINT_MEMORY_DIR"
CHECKPOINT_MEMORY_COPIES: Final = "TRAINSYNC_CHECKPOINT_MEMORY_COPIES"
# Of spec.checkpoint.storage.objectStore, whose URL is CHECKPOINT_DIR: names of our own, so that
# other stores that a training reads keep the clouds' variables. Each key of the Secret comes with
# the prefix, such as TRAINSYNC_STORE_AWS_ACCESS_KEY_ID.
STORE_ENDPOINT: Final = "TRAINSYNC_STORE_ENDPOINT"
STORE_REGION: Final = "TRAINSYNC_STORE_REGION"
STORE_ALLOW_HTTP: Final = "TRAINSYNC_STORE_ALLOW_HTTP"
STORE_UPLOAD_BYTES_PER_SECOND: Final = "TRAINSYNC_STORE_UPLOAD_BYTES_PER_SECOND"
STORE_CREDENTIAL_PREFIX: Final = "TRAINSYNC_STORE_"
# Of spec.checkpoint.mirror, for the monitor.
MIRROR_URL: Final = "TRAINSYNC_MIRROR_URL"
MIRROR_ENDPOINT: Final = "TRAINSYNC_MIRROR_ENDPOINT"
MIRROR_REGION: Final = "TRAINSYNC_MIRROR_REGION"
MIRROR_ALLOW_HTTP: Final = "TRAINSYNC_MIRROR_ALLOW_HTTP"
MIRROR_KEEP_LAST: Final = "TRAINSYNC_MIRROR_KEEP_LAST"
MIRROR_KEEP_EVERY: Final = "TRAINSYNC_MIRROR_KEEP_EVERY"
MIRROR_UPLOAD_BYTES_PER_SECOND: Final = "TRAINSYNC_MIRROR_UPLOAD_BYTES_PER_SECOND"
SYNC_METHOD: Final = "TRAINSYNC_SYNC_METHOD"
SYNC_INTERVAL: Final = "TRAINSYNC_SYNC_INTERVAL"
SYNC_TIMEOUT_SECONDS: Final = "TRAINSYNC_SYNC_TIMEOUT_SECONDS"
SYNC_BUCKET_SIZE: Final = "TRAINSYNC_SYNC_BUCKET_SIZE"
SYNC_DELTA: Final = "TRAINSYNC_SYNC_DELTA"
# Of spec.sync.store. Each key of its Secret comes with the prefix, such as
# TRAINSYNC_SYNC_STORE_AWS_ACCESS_KEY_ID, so that the user's code keeps the clouds' variables.
SYNC_STORE_URL: Final = "TRAINSYNC_SYNC_STORE_URL"
SYNC_STORE_ENDPOINT: Final = "TRAINSYNC_SYNC_STORE_ENDPOINT"
SYNC_STORE_REGION: Final = "TRAINSYNC_SYNC_STORE_REGION"
SYNC_STORE_ALLOW_HTTP: Final = "TRAINSYNC_SYNC_STORE_ALLOW_HTTP"
SYNC_STORE_CREDENTIAL_PREFIX: Final = "TRAINSYNC_SYNC_STORE_"
SYNC_STYLE: Final = "TRAINSYNC_SYNC_STYLE"
SYNC_OFFSET: Final = "TRAINSYNC_SYNC_OFFSET"
SYNC_MAX_STALENESS: Final = "TRAINSYNC_SYNC_MAX_STALENESS"
# The pod's node, by which the save strategy single_node groups ranks. Not passed to other
# processes.
NODE_NAME: Final = "TRAINSYNC_NODE_NAME"
# What may fail at once with the node, such as its zone: copies of kept shards go to another one.
FAILURE_DOMAIN: Final = "TRAINSYNC_FAILURE_DOMAIN"
# The monitor's pod: the holder identity of the run's Lease. A server's pod: the agent's name.
POD_NAME: Final = "TRAINSYNC_POD_NAME"
LOG_LEVEL: Final = "TRAINSYNC_LOG_LEVEL"
# Of the memory file system that an inference server and its agent share; /dev/shm without.
STAGING_MEMORY: Final = "TRAINSYNC_STAGING_MEMORY"
# For the run's job: the entries of spec.servers, as "name=url" separated by commas.
SERVER_URLS: Final = "TRAINSYNC_SERVER_URLS"
# For an agent: the name of its entry of spec.servers.
SERVERS: Final = "TRAINSYNC_SERVERS"
# Of an agent beside an inference server, see docs/servers.md.
AGENT_SERVER: Final = "TRAINSYNC_AGENT_SERVER"
AGENT_ENGINE: Final = "TRAINSYNC_AGENT_ENGINE"
# Of a custom engine: the function that makes its driver, as package.module:function.
AGENT_DRIVER: Final = "TRAINSYNC_AGENT_DRIVER"
# Of SGLang: by which of its routes versions come to the server.
AGENT_SGLANG_ROUTE: Final = "TRAINSYNC_AGENT_SGLANG_ROUTE"
AGENT_PAUSE: Final = "TRAINSYNC_AGENT_PAUSE"
AGENT_DTYPE: Final = "TRAINSYNC_AGENT_DTYPE"
AGENT_HOST: Final = "TRAINSYNC_AGENT_HOST"
AGENT_PORT: Final = "TRAINSYNC_AGENT_PORT"
AGENT_BLIND_SECONDS: Final = "TRAINSYNC_AGENT_BLIND_SECONDS"
AGENT_PREPARE_SECONDS: Final = "TRAINSYNC_AGENT_PREPARE_SECONDS"
# Name of a LoRA adapter; and its adapter_config.json, the file or its content.
AGENT_ADAPTER: Final = "TRAINSYNC_AGENT_ADAPTER"
AGENT_ADAPTER_CONFIG: Final = "TRAINSYNC_AGENT_ADAPTER_CONFIG"
AGENT_FELLOWS: Final = "TRAINSYNC_AGENT_FELLOWS"
AGENT_OTHER_HOSTS: Final = "TRAINSYNC_AGENT_OTHER_HOSTS"
AGENT_LEADER: Final = "TRAINSYNC_AGENT_LEADER"
AGENT_PROOF: Final = "TRAINSYNC_AGENT_PROOF"
AGENT_ENDPOINT: Final = "TRAINSYNC_AGENT_ENDPOINT"
AGENT_SERVE_BEFORE_FIRST_VERSION: Final = "TRAINSYNC_AGENT_SERVE_BEFORE_FIRST_VERSION"
