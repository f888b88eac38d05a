//! The picture: a field of cells for each head, with its norms beside it and its outlier channels above.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "lengths in pixels and steps of brightness are small and never negative"
)]

use super::figures::{HeadFigures, PartFigures, cells_max, percent};
use crate::cli::output::short;
use crate::cli::page_values::PageValues;
use crate::cli::picture::{BRIGHTEST, Canvas, Colour, LETTER_WIDTH, LINE_HEIGHT};

/// Pixels.
const MARGIN: usize = 20;
const CELL_WIDTH_MAX: usize = 8;
const CELL_HEIGHT_MAX: usize = 12;
const MARK_HEIGHT: usize = 8;
const BAR_WIDTH: usize = 64;
const BAR_GAP: usize = 6;
/// Room for the words above a field.
const PANEL_LETTERS: usize = 24;
/// Fields stand beside each other up to this width.
const WIDTH_WANTED: usize = 2000;
/// Room for the widest line of words.
const LINE_LETTERS: usize = 70;
/// The title, and the lines above the fields of a part.
const TITLE_HEIGHT: usize = 2 * LINE_HEIGHT;
const LEGEND_HEIGHT: usize = 4 * LINE_HEIGHT;

/// Where everything stands in one part.
struct Layout {
    columns: usize,
    cell: (usize, usize),
    field: (usize, usize),
    panel: (usize, usize),
    height: usize,
}

impl Layout {
    fn of(values: &PageValues, part: &PartFigures) -> Layout {
        let cells = &part.heads[0].cells;
        let (across, down) = (cells.columns, cells.values.len() / cells.columns);
        // A field grows towards this where it has few cells; it has at least a pixel for each.
        let height = cells_max(values.geometry.num_kv_heads());
        let width = height * 3 / 4;
        let cell =
            ((width / across).clamp(1, CELL_WIDTH_MAX), (height / down).clamp(1, CELL_HEIGHT_MAX));
        let field = (across * cell.0, down * cell.1);
        let words = PANEL_LETTERS * LETTER_WIDTH;
        let panel = (
            (field.0 + BAR_GAP + BAR_WIDTH).max(words) + MARGIN,
            2 * LINE_HEIGHT + MARK_HEIGHT + field.1 + MARGIN,
        );
        let columns = (WIDTH_WANTED / panel.0).clamp(1, part.heads.len());
        let height = LEGEND_HEIGHT + part.heads.len().div_ceil(columns) * panel.1;
        Layout { columns, cell, field, panel, height }
    }
}

/// The picture of the parts of a page, below each other.
pub(super) fn draw(values: &PageValues, parts: &[PartFigures]) -> Canvas {
    let layouts: Vec<Layout> = parts.iter().map(|part| Layout::of(values, part)).collect();
    let panels = layouts.iter().map(|layout| layout.columns * layout.panel.0).max().unwrap_or(0);
    let width = panels.max(LINE_LETTERS * LETTER_WIDTH) + 2 * MARGIN;
    let height = TITLE_HEIGHT + layouts.iter().map(|layout| layout.height).sum::<usize>() + MARGIN;
    let mut canvas = Canvas::new(width, height);
    canvas.write((MARGIN, MARGIN), &title(values));
    let mut y = MARGIN + TITLE_HEIGHT;
    for (part, layout) in parts.iter().zip(&layouts) {
        draw_legend(&mut canvas, y, part);
        for (number, head) in part.heads.iter().enumerate() {
            let x = MARGIN + number % layout.columns * layout.panel.0;
            let y = y + LEGEND_HEIGHT + number / layout.columns * layout.panel.1;
            draw_head(&mut canvas, (x, y), number, head, &Scales::of(part, layout));
        }
        y += layout.height;
    }
    canvas
}

fn title(values: &PageValues) -> String {
    let geometry = &values.geometry;
    let layer = values.layer.map_or(String::new(), |layer| format!("layer {layer}, "));
    let tokens = match values.start {
        Some(start) => format!("tokens {start} to {}", start.0 + u64::from(values.tokens) - 1),
        None => format!("{} tokens", values.tokens),
    };
    format!("{layer}{tokens}, KV heads: {}, {}", geometry.num_kv_heads(), geometry.dtype())
}

/// What brightness, bars and colours mean.
fn draw_legend(canvas: &mut Canvas, y: usize, part: &PartFigures) {
    let cells = &part.heads[0].cells;
    let folded = match (cells.tokens_each, cells.channels_each) {
        (1, 1) => String::new(),
        (tokens, channels) => format!(", a cell is the largest of {tokens} x {channels}"),
    };
    let part_name = part.part.name().to_uppercase();
    let words = format!("{part_name}: rows are tokens, columns channels{folded}");
    canvas.write((MARGIN, y), &words);
    let y = y + LINE_HEIGHT;
    let (steps, step_width) = (usize::from(BRIGHTEST) + 1, 2);
    for step in 0..=BRIGHTEST {
        let x = MARGIN + usize::from(step) * step_width;
        canvas.fill((x, y), (step_width, LINE_HEIGHT - 4), Colour::Step(step));
    }
    let largest = f64::from(part.largest());
    let ramp = steps * step_width;
    let below = y + LINE_HEIGHT;
    canvas.write((MARGIN, below), "0");
    // Brightness grows with the root.
    canvas.write((MARGIN + ramp / 2, below), &short(largest / 4.0));
    let words = short(largest);
    canvas.write((MARGIN + ramp - words.len() * LETTER_WIDTH, below), &words);
    let x = MARGIN + ramp + MARGIN;
    let not_finite: u64 = part.heads.iter().map(|head| head.not_finite).sum();
    for (line, colour, words) in [
        (0, Colour::Mark, "outlier channel".to_owned()),
        (1, Colour::Bar, format!("norm, up to {}", short(part.largest_norm()))),
        (2, Colour::Alarm, format!("NaN, infinite: {not_finite}")),
    ] {
        let y = y + line * LINE_HEIGHT;
        if colour != Colour::Alarm || not_finite > 0 {
            canvas.fill((x, y), (LETTER_WIDTH, LINE_HEIGHT - 4), colour);
            canvas.write((x + 2 * LETTER_WIDTH, y), &words);
        }
    }
}

/// What the heads of a part have in common, so that they can be compared.
struct Scales<'a> {
    layout: &'a Layout,
    largest: f32,
    largest_norm: f64,
}

impl<'a> Scales<'a> {
    fn of(part: &PartFigures, layout: &'a Layout) -> Scales<'a> {
        Scales { layout, largest: part.largest(), largest_norm: part.largest_norm() }
    }

    fn colour(&self, value: f32) -> Colour {
        if value.is_nan() {
            return Colour::Alarm;
        }
        let part = if self.largest > 0.0 { (value / self.largest).sqrt() } else { 0.0 };
        Colour::Step((part * f32::from(BRIGHTEST)).round() as u8)
    }
}

fn draw_head(
    canvas: &mut Canvas, (x, y): (usize, usize), number: usize, head: &HeadFigures,
    scales: &Scales<'_>,
) {
    let (layout, cells) = (scales.layout, &head.cells);
    let outliers = match head.outliers.len() {
        0 => String::new(),
        1 => ", 1 outlier".to_owned(),
        count => format!(", {count} outliers"),
    };
    canvas.write((x, y), &format!("head {number}{outliers}"));
    let [q8_0, q4_0] = head.errors.map(|error| error.map_or("-".to_owned(), percent));
    canvas.write((x, y + LINE_HEIGHT), &format!("q8_0 {q8_0} q4_0 {q4_0}"));
    let marks = y + 2 * LINE_HEIGHT;
    for channel in &head.outliers {
        let x = x + channel / cells.channels_each * layout.cell.0;
        canvas.fill((x, marks), (layout.cell.0, MARK_HEIGHT - 2), Colour::Mark);
    }
    let top = marks + MARK_HEIGHT;
    for (row, values) in cells.values.chunks_exact(cells.columns).enumerate() {
        let y = top + row * layout.cell.1;
        for (column, value) in values.iter().enumerate() {
            canvas.fill((x + column * layout.cell.0, y), layout.cell, scales.colour(*value));
        }
    }
    let bars = x + layout.field.0 + BAR_GAP;
    for (row, norms) in head.norms.chunks(cells.tokens_each).enumerate() {
        let norm = norms.iter().copied().fold(0.0, f64::max);
        let part = if scales.largest_norm > 0.0 { norm / scales.largest_norm } else { 0.0 };
        let length = (part * BAR_WIDTH as f64).round() as usize;
        let height = layout.cell.1.max(2) - 1;
        canvas.fill((bars, top + row * layout.cell.1), (length, height), Colour::Bar);
    }
}
