"""Writers of plans in the formats of other frameworks; `nnpiper.export` is the way in."""
