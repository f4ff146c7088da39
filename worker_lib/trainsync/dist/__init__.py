"""What ranks say to one another beside the collectives of training. Imports torch when used."""
