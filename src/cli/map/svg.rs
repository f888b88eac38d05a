//! The map as a picture for documents and tickets.

use std::fmt::Write;

use super::gather::Subject;
use super::grid::{Face, Grid, Sum};
use super::legend::{self, colour, tenths};
use super::page::Place;
use super::text::{Age, extent};
use crate::cli::markup::escaped;

/// Pixels.
const CELL_WIDTH: usize = 10;
const CELL_HEIGHT: usize = 14;
const LABEL_WIDTH: usize = 160;
const LINE_HEIGHT: usize = 18;
const MARGIN: usize = 10;
/// Room for the widest line of words.
const WIDTH_MIN: usize = 640;

/// The picture.
pub(super) fn of(subject: &Subject, grid: &Grid, now_seconds: u64) -> String {
    let cells = grid.rows.first().map_or(0, |row| row.cells.len());
    let legend = legend::lines(&grid.totals, "dashed border");
    let width = (LABEL_WIDTH + cells * CELL_WIDTH + 2 * MARGIN).max(WIDTH_MIN);
    let top = MARGIN + 2 * LINE_HEIGHT;
    let bottom = top + grid.rows.len() * CELL_HEIGHT + MARGIN;
    let height = bottom + (legend.len() + 1) * LINE_HEIGHT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"monospace\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    add_text(&mut svg, MARGIN, MARGIN + 12, &subject.path);
    add_text(&mut svg, MARGIN, MARGIN + 12 + LINE_HEIGHT, &extent(subject, grid));
    for (number, row) in grid.rows.iter().enumerate() {
        let y = top + number * CELL_HEIGHT;
        add_text(&mut svg, MARGIN, y + 11, &row.label);
        for (at, cell) in row.cells.iter().enumerate() {
            add_cell(&mut svg, (LABEL_WIDTH + at * CELL_WIDTH, y), cell, now_seconds);
        }
    }
    for (number, (place, words)) in legend.iter().enumerate() {
        let y = bottom + number * LINE_HEIGHT;
        if let Some(place) = place {
            let (width, height, colour) = (CELL_WIDTH, CELL_HEIGHT, hex(*place));
            let _ = writeln!(
                svg,
                "<rect x=\"{MARGIN}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{colour}\"/>"
            );
        }
        add_text(&mut svg, MARGIN + 2 * CELL_WIDTH, y + 11, words);
    }
    svg.push_str("</svg>\n");
    svg
}

fn add_text(svg: &mut String, x: usize, y: usize, text: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\">{}</text>", escaped(text));
}

fn add_cell(svg: &mut String, (x, y): (usize, usize), cell: &Sum, now_seconds: u64) {
    let (fill, opacity) = match cell.face() {
        Face::Nothing => return,
        Face::Absent => ("none".to_owned(), "1".to_owned()),
        Face::Pages(place) => (hex(place), opacity(cell, now_seconds)),
    };
    let stroke = match cell {
        cell if cell.pinned > 0 => " stroke=\"#000000\"",
        cell if cell.shared > 0 => " stroke=\"#888888\" stroke-dasharray=\"2\"",
        _ if fill == "none" => " stroke=\"#dddddd\"",
        _ => "",
    };
    let (width, height) = (CELL_WIDTH - 1, CELL_HEIGHT - 2);
    let _ = writeln!(
        svg,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\" \
         fill-opacity=\"{opacity}\"{stroke}/>"
    );
}

/// As SVG has it.
fn hex(place: Place) -> String {
    let [red, green, blue] = colour(place);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn opacity(cell: &Sum, now_seconds: u64) -> String {
    let tenths = tenths(Age::of(cell.used_seconds, now_seconds));
    (f32::from(tenths) / 10.0).to_string()
}

#[cfg(test)]
mod tests {
    use super::super::grid::tests::{layer, page, sequence};
    use super::*;

    #[test]
    fn a_picture_has_each_cell_and_no_foreign_markup() {
        let lines = [page(0, "ram raw 10 90000 1 pinned"), page(2, "remote zst 10 1 2 -")];
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let mut subject = sequence(vec![layer(0, &lines)]);
        subject.path = "/m/<script>&\"'".to_owned();
        let svg = of(&subject, &Grid::of(&subject), 90_010);
        assert!(svg.contains(">/m/&lt;script&gt;&amp;&quot;&#39;</text>"), "{svg}");
        let cells = |what: &str| svg.matches(what).count();
        assert_eq!(cells("fill=\"#2a9d3a\" fill-opacity=\"1\" stroke=\"#000000\"/>"), 1, "{svg}");
        assert_eq!(cells("fill=\"none\" fill-opacity=\"1\" stroke=\"#dddddd\"/>"), 1, "{svg}");
        assert_eq!(cells("fill=\"#e0a100\" fill-opacity=\"0.4\" stroke=\"#888888\""), 1, "{svg}");
        assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"));
    }
}
