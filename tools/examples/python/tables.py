"""Tables and pictures of the examples: a CSV file of rows, and curves drawn from it, here or on another machine."""

import csv


def add_options(parser):
    parser.add_argument("--csv", help="write the table here")
    parser.add_argument("--png", help="draw it here; needs matplotlib")
    parser.add_argument(
        "--draw", metavar="CSV", help="run nothing: draw what --csv wrote, e.g. on another machine"
    )


def write(path, rows):
    """rows: dicts with the same names."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(
            {name: f"{x:.8g}" if isinstance(x, float) else x for name, x in row.items()} for row in rows
        )


def read(path):
    """What write() wrote, all as text."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def draw(path, curves, **words):
    """curves: (label, xs, ys) of each. words: title, xlabel and ylabel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for (label, xs, ys), style in zip(curves, ("-", "--")):
        axes.plot(xs, ys, style, label=label)
    axes.set(**words)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def finish(options, rows, draw_rows):
    """Writes and draws what the options ask for. draw_rows(path, rows) takes rows as read() gives them."""
    if options.csv:
        write(options.csv, rows)
    if options.png:
        draw_rows(options.png, rows)


def drawn(options, draw_rows):
    """Whether --draw was given, whose picture is made then."""
    if options.draw:
        draw_rows(options.png or options.draw.removesuffix(".csv") + ".png", read(options.draw))
    return bool(options.draw)
