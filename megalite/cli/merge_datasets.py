"""Join indexed datasets, in the order of the inputs, into OUTPUT_PREFIX.bin and .idx, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.data.dataset_merge import find_prefixes, merge_datasets
from megalite.frontends.tool_parser import ToolParser


def main(arguments: Sequence[str]) -> None:
    """Merge the datasets, and print what was written."""
    parser = ToolParser(description=__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PREFIX", help="prefixes, or folders of datasets"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    parser.add_argument("--overwrite", action="store_true", help="replace existing output")
    flags = parser.parse_args(arguments)
    merged = merge_datasets(find_prefixes(flags.input), flags.output_prefix, flags.overwrite)
    print(
        f"wrote {flags.output_prefix}.bin and .idx: {merged.num_documents:,} documents and "
        f"{merged.num_tokens:,} tokens of {len(merged.prefixes)} datasets"
    )
