"""Images inside other files: members of tars, rows of parquet files and of data sets that ``datasets`` saved."""
