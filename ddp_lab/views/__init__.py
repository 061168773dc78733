"""What a view shows, without a browser: its numbers, its picture as SVG, its figure for plotly."""
