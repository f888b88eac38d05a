//! The map for a page in a browser: the letters of a terminal, which the page paints.

use serde_json::{Value, json};

use super::gather::Subject;
use super::grid::{Face, Grid, Sum};
use super::page::Place;
use super::text::{Age, extent, letter};

/// The picture: of each row its letters, and for each whether it was used within an hour, a day, or longer ago (0, 1, 2).
pub(super) fn of(subject: &Subject, grid: &Grid, now_seconds: u64) -> Value {
    let rows = grid.rows.iter().map(|row| {
        let cells: String = row.cells.iter().map(drawn).collect();
        let age = |cell: &Sum| match Age::of(cell.used_seconds, now_seconds) {
            Age::Hour => '0',
            Age::Day => '1',
            Age::Older => '2',
        };
        let ages: String = row.cells.iter().map(age).collect();
        json!({ "label": row.label, "cells": cells, "ages": ages })
    });
    let totals = &grid.totals;
    let legend = Place::ALL.into_iter().filter(|place| totals.pages[*place as usize] > 0);
    let legend = legend.map(|place| {
        json!({
            "letter": place.letter(),
            "words": place.in_words(),
            "pages": totals.pages[place as usize],
            "bytes": totals.bytes[place as usize],
        })
    });
    json!({
        "path": subject.path,
        "extent": extent(subject, grid),
        "rows": rows.collect::<Vec<_>>(),
        "legend": legend.collect::<Vec<_>>(),
        "absent": totals.absent,
        "pinned": totals.pinned,
        "shared": totals.shared,
    })
}

fn drawn(cell: &Sum) -> char {
    match cell.face() {
        Face::Nothing => ' ',
        Face::Absent => '.',
        Face::Pages(place) => letter(place, cell),
    }
}

#[cfg(test)]
mod tests {
    use super::super::grid::tests::{layer, page, sequence};
    use super::*;

    #[test]
    fn letters_and_ages_stand_below_each_other() {
        let lines = [page(0, "ram raw 10 90000 1 pinned"), page(2, "remote zst 10 1 2 -")];
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let subject = sequence(vec![layer(0, &lines)]);
        let map = of(&subject, &Grid::of(&subject), 90_010);
        assert_eq!(map["rows"][0], json!({ "label": "000", "cells": "M.r", "ages": "022" }));
        let legend =
            json!({ "letter": "r", "words": "only in the remote", "pages": 1, "bytes": 10 });
        assert_eq!(map["legend"][1], legend);
        assert_eq!(
            (&map["absent"], &map["pinned"], &map["shared"]),
            (&1.into(), &1.into(), &1.into())
        );
    }
}
