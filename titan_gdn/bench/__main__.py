"""The command `python -m titan_gdn.bench`."""

import warnings

from titan_gdn import cpu


def main() -> None:
    """Measure a layer, or of it the exchange alone."""
    warnings.simplefilter("ignore")
    cpu.enable()
    import tyro

    from titan_gdn.bench.layer import LayerOptions, run

    def layer(options: tyro.conf.OmitArgPrefixes[LayerOptions]) -> None:
        """The whole layer, with each exchange."""
        run(options)

    def exchange(options: tyro.conf.OmitArgPrefixes[LayerOptions]) -> None:
        """Each exchange without projections and rule: communication alone."""
        run(options, computes=False)

    tyro.extras.subcommand_cli_from_dict({"layer": layer, "exchange": exchange})


if __name__ == "__main__":
    main()
