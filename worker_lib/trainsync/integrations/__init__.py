"""Other people's trainers, with trainsync switched on by their own configuration."""
