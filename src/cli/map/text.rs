//! The map in characters: it fits 80 columns, and says what they mean.

use std::fmt::Write;

use super::gather::{Content, Subject};
use super::grid::{Face, Grid, Sum};
use super::page::Place;
use crate::cli::output::{bytes, counted};
use crate::cli::style::{Paint, Style};

pub(super) const LABEL_CHARS: usize = 14;
const HOUR_SECONDS: u64 = 3600;
const DAY_SECONDS: u64 = 86_400;

/// How long ago something was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Age {
    Hour,
    Day,
    Older,
}

impl Age {
    pub(super) fn of(used_seconds: u64, now_seconds: u64) -> Age {
        match now_seconds.saturating_sub(used_seconds) {
            0..HOUR_SECONDS => Age::Hour,
            HOUR_SECONDS..DAY_SECONDS => Age::Day,
            _ => Age::Older,
        }
    }
}

/// The map for people.
pub(super) fn of(subject: &Subject, grid: &Grid, now_seconds: u64, style: Style) -> String {
    let mut text =
        format!("{}\n{}\n", style.paint(Paint::Heading, &subject.path), extent(subject, grid));
    for row in &grid.rows {
        let label = shortened(&row.label);
        let cells = painted(&row.cells, now_seconds, style);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{label:<LABEL_CHARS$} {}", cells.trim_end());
    }
    add_legend(&grid.totals, style, &mut text);
    text
}

/// What rows and columns are, and how many pages a cell is.
pub(super) fn extent(subject: &Subject, grid: &Grid) -> String {
    let (name, several) = match subject.content {
        Content::Sequence(_) => ("layer", "layers"),
        Content::Model(_) => ("sequence", "sequences"),
    };
    let rows = if grid.lines == 1 { name } else { several };
    let pages = if grid.columns == 1 { "page" } else { "pages" };
    let cell = match grid.pages_per_cell {
        1 => "one cell is 1 page".to_owned(),
        count => format!("one cell is up to {count} pages"),
    };
    let tokens = subject.page_tokens;
    format!("{} {rows} by {} {pages} of {tokens} tokens; {cell}", grid.lines, grid.columns)
}

/// A label that leaves room for the cells: its beginning and its end tell most.
pub(super) fn shortened(label: &str) -> String {
    let count = label.chars().count();
    if count <= LABEL_CHARS {
        return label.to_owned();
    }
    let half = (LABEL_CHARS - 2) / 2;
    let first: String = label.chars().take(half).collect();
    let last: String = label.chars().skip(count - half).collect();
    format!("{first}..{last}")
}

fn painted(cells: &[Sum], now_seconds: u64, style: Style) -> String {
    let mut text = String::new();
    let mut same = (String::new(), String::new());
    for cell in cells {
        let (parameters, drawn) = match cell.face() {
            Face::Nothing => (String::new(), ' '),
            Face::Absent => (String::new(), '.'),
            Face::Pages(place) => (parameters(place, cell, now_seconds), letter(place, cell)),
        };
        if parameters != same.0 {
            text.push_str(&finished(&same, style));
            same = (parameters, String::new());
        }
        same.1.push(drawn);
    }
    text + &finished(&same, style)
}

fn finished((parameters, letters): &(String, String), style: Style) -> String {
    if parameters.is_empty() { letters.clone() } else { style.paint_with(parameters, letters) }
}

pub(super) fn letter(place: Place, cell: &Sum) -> char {
    let letter = place.letter();
    if cell.pinned > 0 { letter.to_ascii_uppercase() } else { letter }
}

/// Of an escape sequence: the colour of a place, brighter the later it was used.
fn parameters(place: Place, cell: &Sum, now_seconds: u64) -> String {
    let brightness = match Age::of(cell.used_seconds, now_seconds) {
        Age::Hour => "1;",
        Age::Day => "",
        Age::Older => "2;",
    };
    let underlined = if cell.shared > 0 { "4;" } else { "" };
    format!("{brightness}{underlined}{}", colour(place))
}

fn colour(place: Place) -> u8 {
    match place {
        Place::Memory => 32,
        Place::Disk => 36,
        Place::Lossy => 35,
        Place::Compressed => 34,
        Place::Remote => 33,
        Place::Hidden => 37,
        Place::Damaged => 31,
    }
}

fn add_legend(totals: &Sum, style: Style, text: &mut String) {
    for place in Place::ALL {
        let count = totals.pages[place as usize];
        if count > 0 {
            let letter = style.paint_with(&colour(place).to_string(), &place.letter().to_string());
            let (words, size) = (place.in_words(), bytes(totals.bytes[place as usize]));
            let pages = if count == 1 { "page" } else { "pages" };
            let _ = writeln!(text, "{letter} {words:<20} {count:>9} {pages:<5}  {size}");
        }
    }
    if totals.absent > 0 {
        let pages = if totals.absent == 1 { "page" } else { "pages" };
        let _ = writeln!(text, ". {:<20} {:>9} {pages}", "absent", totals.absent);
    }
    if totals.pinned > 0 {
        let pages = counted(totals.pinned, "page is", "pages are");
        let _ = writeln!(text, "capital: {pages} pinned");
    }
    if totals.shared > 0 {
        let underlined = if style.is_coloured { "underlined: " } else { "" };
        let pages = counted(totals.shared, "page is", "pages are");
        let _ = writeln!(text, "{underlined}{pages} shared with other sequences");
    }
    if style.is_coloured {
        text.push_str("bright: used within an hour, dark: not within a day\n");
    }
}

#[cfg(test)]
mod tests {
    use super::super::grid::tests::{layer, page, sequence};
    use super::*;

    fn drawn(style: Style) -> String {
        let lines = [
            page(0, "ram raw 1024 90000 2 pinned"),
            page(1, "ssd raw 1024 1 1 -"),
            page(3, "remote zst 1024 80000 1 -"),
        ];
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let subject = sequence(vec![layer(0, &lines), layer(1, &lines[..2])]);
        of(&subject, &Grid::of(&subject), 90_010, style)
    }

    #[test]
    fn a_map_of_characters() {
        let expected = "/mnt/models/m/sequences/a\n2 layers by 4 pages of 16 tokens; one cell is 1 page\n\
            000            Md.r\n001            Md..\n\
            m memory                       2 pages  2.0 KiB\n\
            d disk                         2 pages  2.0 KiB\n\
            r only in the remote           1 page   1.0 KiB\n\
            . absent                       3 pages\n\
            capital: 2 pages are pinned\n2 pages are shared with other sequences\n";
        assert_eq!(drawn(Style { is_coloured: false }), expected);
    }

    #[test]
    fn colours_tell_the_last_use_and_what_is_shared() {
        let text = drawn(Style { is_coloured: true });
        let row =
            "000            \u{1b}[1;4;32mM\u{1b}[0m\u{1b}[2;36md\u{1b}[0m.\u{1b}[33mr\u{1b}[0m\n";
        assert!(text.contains(row), "{text:?}");
        assert!(text.contains("underlined: 2 pages"), "{text:?}");
    }

    #[test]
    fn it_fits_80_columns() {
        let label = "conversation-of-alice-2026-11-25";
        assert_eq!(shortened(label), "conver..-11-25");
        assert_eq!(shortened("chat"), "chat");
        let lines: Vec<_> = (0..5000).map(|n| page(n, "ssd raw 10 5 1 -")).collect();
        let layers = [layer(0, &lines.iter().map(String::as_str).collect::<Vec<_>>())];
        let subject = sequence(layers.into());
        let text = of(&subject, &Grid::of(&subject), 0, Style { is_coloured: false });
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("one cell is up to 79 pages"), "{text}");
    }
}
