"""trainsync in third-party trainers, switched on by the trainer's own configuration."""
