"""Tasks as folders, in the form of Harbor: read as a data set, and played in sandboxes."""
