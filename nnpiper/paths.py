"""Where the repository keeps its files: ROOT, DATA (catalogues, checkpoint), FIGURES (tables and figures)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"
FIGURES = ROOT / "figures"
CHECKPOINT = DATA / "checkpoint" / "nnpiper.pt"  # the shipped one; its card and log lie beside it
