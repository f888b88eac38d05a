//! What the colours and borders of a picture mean.

use super::grid::Sum;
use super::page::Place;
use super::text::Age;
use crate::cli::output::{bytes, counted};

/// Red, green and blue of what was used within an hour.
pub(super) fn colour(place: Place) -> [u8; 3] {
    match place {
        Place::Memory => [0x2a, 0x9d, 0x3a],
        Place::Disk => [0x1f, 0x77, 0xb4],
        Place::Lossy => [0x94, 0x67, 0xbd],
        Place::Compressed => [0x17, 0x40, 0x8b],
        Place::Remote => [0xe0, 0xa1, 0x00],
        Place::Hidden => [0x99, 0x99, 0x99],
        Place::Damaged => [0xd6, 0x27, 0x28],
    }
}

/// How much of a colour is left on white paper, in tenths.
pub(super) fn tenths(age: Age) -> u8 {
    match age {
        Age::Hour => 10,
        Age::Day => 7,
        Age::Older => 4,
    }
}

/// Lines with the colour that they explain; pages of others have a border as it is called here.
pub(super) fn lines(totals: &Sum, shared_border: &str) -> Vec<(Option<Place>, String)> {
    let mut lines = Vec::new();
    for place in Place::ALL {
        let count = totals.pages[place as usize];
        if count > 0 {
            let size = bytes(totals.bytes[place as usize]);
            let pages = counted(count, "page", "pages");
            lines.push((Some(place), format!("{}: {pages}, {size}", place.in_words())));
        }
    }
    let others = [
        (totals.absent, "absent (empty cells)".to_owned()),
        (totals.pinned, "pinned (black border)".to_owned()),
        (totals.shared, format!("shared with other sequences ({shared_border})")),
    ];
    let others = others.into_iter().filter(|(count, _)| *count > 0);
    lines.extend(
        others.map(|(count, what)| {
            (None, format!("{} {what}", counted(count, "page is", "pages are")))
        }),
    );
    lines.push((None, "full colour: used within an hour; pale: not within a day".to_owned()));
    lines
}
