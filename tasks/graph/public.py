"""What is known of the public graphs before they are there."""

IGB = {
    "igb-tiny": 100_000,
    "igb-small": 1_000_000,
    "igb-medium": 10_000_000,
    "igb-large": 100_000_000,
    "igb-full": 269_346_174,
}
"""Papers."""

KNOWN: dict[str, dict[str, int]] = {
    # ogb.stanford.edu/docs/nodeprop, and the sizes of the published split
    "papers100m": {
        "nodes": 111_059_956,
        "published_edges": 1_615_685_872,
        "features": 128,
        "classes": 172,
        "train": 1_207_179,
        "val": 125_265,
        "test": 214_338,
    },
    # OGB-LSC, arXiv 2103.09430
    "mag240m": {
        "nodes": 121_751_666,
        "published_edges": 1_297_748_926,
        "features": 768,
        "classes": 153,
        "train": 1_112_392,
        "val": 138_949,
        "test": 0,
    },
    # snap.stanford.edu/data/com-Friendster.html
    "friendster": {
        "nodes": 65_608_366,
        "published_edges": 1_806_067_135,
        "edges": 2 * 1_806_067_135,
    },
    # igb/dataloader.py has the nodes; arXiv 2302.13522
    **{name: {"nodes": nodes, "features": 1024, "classes": 19} for name, nodes in IGB.items()},
}
"""What is known of the public sets, by their names here."""

DISK_BYTES = {"papers100m": 71_000_000_000, "mag240m": 198_000_000_000}
"""Of those that are labelled and whose split is published, once prepared, rounded."""
