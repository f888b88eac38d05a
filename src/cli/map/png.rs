//! The map as a picture of pixels, for what shows no SVG.

use super::gather::Subject;
use super::grid::{Face, Grid, Sum};
use super::legend::{self, colour, tenths};
use super::page::Place;
use super::text::{Age, LABEL_CHARS, extent, shortened};
use crate::cli::picture::{Canvas, LETTER_WIDTH, LINE_HEIGHT, Palette};

/// Pixels.
const CELL_WIDTH: usize = 12;
const BORDER: usize = 2;
const MARGIN: usize = 20;
const LABEL_WIDTH: usize = (LABEL_CHARS + 1) * LETTER_WIDTH;

/// What a pixel looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tint {
    Paper,
    Ink,
    /// The border of what is absent.
    Absent,
    /// The border of what others have too.
    Shared,
    Page(Place, Age),
}

impl Tint {
    const BORDERS: [Tint; 4] = [Tint::Paper, Tint::Ink, Tint::Absent, Tint::Shared];

    fn red_green_blue(self) -> [u8; 3] {
        match self {
            Tint::Paper => [255; 3],
            Tint::Ink => [0; 3],
            Tint::Absent => [0xdd; 3],
            Tint::Shared => [0x88; 3],
            Tint::Page(place, age) => colour(place).map(|part| {
                let taken = (255 - u32::from(part)) * u32::from(tenths(age)) / 10;
                u8::try_from(255 - taken).unwrap_or(u8::MAX)
            }),
        }
    }
}

impl Palette for Tint {
    const PAPER: Tint = Tint::Paper;
    const INK: Tint = Tint::Ink;

    fn index(self) -> u8 {
        match self {
            Tint::Paper => 0,
            Tint::Ink => 1,
            Tint::Absent => 2,
            Tint::Shared => 3,
            Tint::Page(place, age) => 4 + place as u8 * 3 + age as u8,
        }
    }

    fn colours() -> Vec<[u8; 3]> {
        let ages = [Age::Hour, Age::Day, Age::Older];
        let of_place = |place| ages.map(|age| Tint::Page(place, age));
        let pages = Place::ALL.into_iter().flat_map(of_place);
        Tint::BORDERS.into_iter().chain(pages).map(Tint::red_green_blue).collect()
    }
}

/// The picture.
pub(super) fn of(subject: &Subject, grid: &Grid, now_seconds: u64) -> Canvas<Tint> {
    let cells = grid.rows.first().map_or(0, |row| row.cells.len());
    let legend = legend::lines(&grid.totals, "grey border");
    let title = [subject.path.clone(), extent(subject, grid)];
    let letters = title.iter().map(|line| line.chars().count());
    let letters = letters.chain(legend.iter().map(|(_, line)| line.chars().count() + 2)).max();
    let wide = (LABEL_WIDTH + cells * CELL_WIDTH).max(letters.unwrap_or(0) * LETTER_WIDTH);
    let lines = title.len() + grid.rows.len() + legend.len() + 2;
    let mut canvas = Canvas::new(wide + 2 * MARGIN, lines * LINE_HEIGHT + 2 * MARGIN);
    let mut y = MARGIN;
    for line in &title {
        canvas.write((MARGIN, y), line);
        y += LINE_HEIGHT;
    }
    y += LINE_HEIGHT;
    for row in &grid.rows {
        canvas.write((MARGIN, y), &shortened(&row.label));
        for (at, cell) in row.cells.iter().enumerate() {
            add_cell(&mut canvas, (MARGIN + LABEL_WIDTH + at * CELL_WIDTH, y), cell, now_seconds);
        }
        y += LINE_HEIGHT;
    }
    y += LINE_HEIGHT;
    for (place, words) in legend {
        if let Some(place) = place {
            canvas.fill((MARGIN, y), CELL, Tint::Page(place, Age::Hour));
        }
        canvas.write((MARGIN + 2 * LETTER_WIDTH, y), &words);
        y += LINE_HEIGHT;
    }
    canvas
}

/// Of a cell, without the gap to its neighbours.
const CELL: (usize, usize) = (CELL_WIDTH - 1, LINE_HEIGHT - 2);

fn add_cell(canvas: &mut Canvas<Tint>, at: (usize, usize), cell: &Sum, now_seconds: u64) {
    let inside = match cell.face() {
        Face::Nothing => return,
        Face::Absent => Tint::Paper,
        Face::Pages(place) => Tint::Page(place, Age::of(cell.used_seconds, now_seconds)),
    };
    let border = match cell {
        cell if cell.pinned > 0 => Tint::Ink,
        cell if cell.shared > 0 => Tint::Shared,
        _ if inside == Tint::Paper => Tint::Absent,
        _ => inside,
    };
    canvas.fill(at, CELL, border);
    let within = (CELL.0 - 2 * BORDER, CELL.1 - 2 * BORDER);
    canvas.fill((at.0 + BORDER, at.1 + BORDER), within, inside);
}

#[cfg(test)]
mod tests {
    use super::super::grid::tests::{layer, page, sequence};
    use super::*;
    use crate::cli::picture::{decoded, write};

    #[test]
    fn pixels_have_the_colours_of_tiers() {
        let lines = [
            page(0, "ram raw 10 90000 1 pinned"),
            page(1, "ssd raw 10 1 1 -"),
            page(3, "remote zst 10 89000 2 -"),
        ];
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let subject = sequence(vec![layer(0, &lines)]);
        let mut file = Vec::new();
        write(&of(&subject, &Grid::of(&subject), 90_010), &mut file).unwrap();
        let (width, pixels) = decoded(&file);
        // Behind the title, its empty line and the border of the first cell.
        let (x, y) = (MARGIN + LABEL_WIDTH + BORDER, MARGIN + 3 * LINE_HEIGHT + BORDER);
        let at = |column: usize, up: usize| pixels[(y - up) * width + x + column * CELL_WIDTH];
        let inside: Vec<_> = (0..4).map(|column| at(column, 0)).collect();
        let pale_disk = [0x1f_u32, 0x77, 0xb4].map(|part| 255 - (255 - part) * 4 / 10);
        let pale_disk = pale_disk.map(|part| u8::try_from(part).unwrap());
        assert_eq!(inside, [[0x2a, 0x9d, 0x3a], pale_disk, [255; 3], [0xe0, 0xa1, 0]]);
        let borders: Vec<_> = (0..4).map(|column| at(column, 1)).collect();
        assert_eq!(borders, [[0; 3], pale_disk, [0xdd; 3], [0x88; 3]]);
    }

    #[test]
    fn every_colour_has_its_index() {
        let colours = Tint::colours();
        for tint in [Tint::Shared, Tint::Page(Place::Damaged, Age::Older)] {
            assert_eq!(colours[usize::from(tint.index())], tint.red_green_blue());
        }
    }
}
