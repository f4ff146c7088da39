module trainsync.dev/devcluster/tools/pause

go 1.24.0
