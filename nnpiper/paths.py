"""Where the repository keeps its files: ROOT, DATA (catalogues, checkpoint), FIGURES (tables and figures).

PROFILES, measured by others, may lie beside it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"
FIGURES = ROOT / "figures"
PROFILES = ROOT.parent / "shared" / "profiles"
CHECKPOINT = DATA / "checkpoint" / "nnpiper.pt"  # the shipped one; its card and log lie beside it
