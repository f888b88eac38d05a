//! Sections of lines that share the height there is.

use ratatui::text::{Line, Span};

/// Lines that are shown together, or the first ones of them.
pub(super) struct Section {
    pub(super) lines: Vec<Line<'static>>,
    /// So many come before any further line of a later section.
    pub(super) least: usize,
}

impl Section {
    pub(super) fn new(title: Line<'static>, lines: Vec<Line<'static>>, least: usize) -> Section {
        let mut all = vec![title];
        all.extend(lines);
        Section { lines: all, least: least + 1 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lines.len() <= 1
    }
}

/// Lines of two sections in one: those on the right begin in the same column.
pub(super) fn side_by_side(
    left: Vec<Line<'static>>, right: Vec<Line<'static>>, [left_columns, right_columns]: [usize; 2],
) -> Vec<Line<'static>> {
    let count = left.len().max(right.len());
    let (mut left, mut right) = (left.into_iter(), right.into_iter());
    let rows = (0..count).map(|_| {
        let mut row = left.next().unwrap_or_default();
        let gap = (left_columns + 1).saturating_sub(row.width());
        row.spans.push(Span::raw(" ".repeat(gap)));
        let mut room = right_columns;
        for mut span in right.next().unwrap_or_default().spans {
            while span.width() > room {
                span.content.to_mut().pop();
            }
            room -= span.width();
            row.spans.push(span);
        }
        row
    });
    rows.collect()
}

/// Sections below each other: each gets its least lines as long as there is room, then the first of them the rest.
pub(super) fn stacked(sections: Vec<Section>, height: usize) -> Vec<Line<'static>> {
    let sections: Vec<_> = sections.into_iter().filter(|section| !section.is_empty()).collect();
    let wanted: Vec<_> =
        sections.iter().map(|section| (section.least, section.lines.len())).collect();
    let given = shares(&wanted, height);
    let lines = sections.into_iter().zip(given);
    lines.flat_map(|(section, count)| section.lines.into_iter().take(count)).collect()
}

/// Of a height, what each gets that wants at least so much and at most so much. A title alone tells nothing.
fn shares(wanted: &[(usize, usize)], height: usize) -> Vec<usize> {
    let mut left = height;
    let mut given = Vec::new();
    for (least, most) in wanted {
        let first = (*least).min(*most).min(left);
        let first = if first < 2 { 0 } else { first };
        left -= first;
        given.push(first);
    }
    for (given, (_, most)) in given.iter_mut().zip(wanted) {
        if *given > 0 {
            let more = (most - *given).min(left);
            *given += more;
            left -= more;
        }
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn height_is_shared() {
        // The least of each first, then the rest from the first on; a title alone is left out.
        assert_eq!(shares(&[(3, 5), (2, 9), (4, 4)], 100), [5, 9, 4]);
        assert_eq!(shares(&[(3, 5), (2, 9), (4, 4)], 11), [5, 2, 4]);
        assert_eq!(shares(&[(3, 5), (2, 9), (4, 4)], 6), [4, 2, 0]);
        assert_eq!(shares(&[(3, 5), (2, 9)], 0), [0, 0]);
    }
}
