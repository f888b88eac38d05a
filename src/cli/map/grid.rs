//! Pages folded into the cells of a picture that fits a terminal, however many there are.

use super::gather::{Content, LayerPages, Subject};
use super::page::{Kind, Page, Place};

/// Cells beside each other: with a label they fit 80 columns.
const COLUMNS_MAX: u64 = 64;
/// Rows below each other: a page of paper, or two screens.
const ROWS_MAX: usize = 40;

/// What some pages have in common with a cell, or with everything that is drawn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    /// By [`Place`].
    pub(super) pages: [u64; Place::ALL.len()],
    pub(super) bytes: [u64; Place::ALL.len()],
    /// Pages that would be there if nothing were missing.
    pub(super) absent: u64,
    pub(super) pinned: u64,
    pub(super) shared: u64,
    /// When one was used last, in seconds since 1970.
    pub(super) used_seconds: u64,
}

/// What a cell shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Face {
    /// Behind the end.
    Nothing,
    Absent,
    Pages(Place),
}

impl Sum {
    fn add(&mut self, page: &Page) {
        self.pages[page.place as usize] += 1;
        self.bytes[page.place as usize] += page.bytes;
        self.pinned += u64::from(page.is_pinned);
        self.shared += u64::from(page.is_shared());
        self.used_seconds = self.used_seconds.max(page.used_seconds);
    }

    pub(super) fn face(&self) -> Face {
        let damaged = self.pages[Place::Damaged as usize];
        // Of as many the last, which is the worst.
        let most = Place::ALL.into_iter().max_by_key(|place| self.pages[*place as usize]);
        let most = most.map(|place| (place, self.pages[place as usize]));
        match most {
            _ if damaged > 0 => Face::Pages(Place::Damaged),
            Some((place, count)) if count > 0 && count >= self.absent => Face::Pages(place),
            _ if self.absent > 0 => Face::Absent,
            _ => Face::Nothing,
        }
    }
}

#[derive(Debug)]
pub(super) struct Row {
    pub(super) label: String,
    pub(super) cells: Vec<Sum>,
}

/// The picture.
#[derive(Debug)]
pub(super) struct Grid {
    pub(super) rows: Vec<Row>,
    /// Layers, or sequences.
    pub(super) lines: usize,
    /// Pages one behind the other, of the longest line.
    pub(super) columns: u64,
    /// Pages that a cell has room for.
    pub(super) pages_per_cell: u64,
    pub(super) totals: Sum,
}

/// What becomes a row: a layer of a sequence, or all layers of one.
struct Line<'a> {
    label: String,
    layers: Vec<&'a LayerPages>,
    /// Pages that a layer would have up to where the sequence ends.
    columns: u64,
}

/// Which page of a layer, from 0.
fn column(page: &Page, page_tokens: u64) -> u64 {
    match page.kind {
        Kind::Page | Kind::Tail => page.start / page_tokens,
        // It belongs to the token before it.
        Kind::State => page.start.saturating_sub(1) / page_tokens,
    }
}

fn columns<'a>(layers: impl IntoIterator<Item = &'a LayerPages>, page_tokens: u64) -> u64 {
    let pages = layers.into_iter().flat_map(|layer| &layer.pages);
    pages.map(|page| column(page, page_tokens).saturating_add(1)).max().unwrap_or(0)
}

fn lines(subject: &Subject) -> Vec<Line<'_>> {
    let tokens = subject.page_tokens;
    match &subject.content {
        Content::Sequence(layers) => {
            let columns = columns(layers, tokens);
            let mut lines = Vec::new();
            for layer in layers {
                let label = format!("{:03}", layer.layer);
                lines.push(Line { label, layers: vec![layer], columns });
            }
            lines
        }
        Content::Model(sequences) => {
            let used = |layers: &[LayerPages]| {
                layers.iter().flat_map(|layer| &layer.pages).map(|page| page.used_seconds).max()
            };
            let mut order: Vec<_> = sequences.iter().map(|(name, l)| (used(l), name, l)).collect();
            order.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(b.1)));
            let mut lines = Vec::new();
            for (_, name, layers) in order {
                let columns = columns(layers, tokens);
                lines.push(Line { label: name.clone(), layers: layers.iter().collect(), columns });
            }
            lines
        }
    }
}

impl Grid {
    /// Folds what is known into cells.
    pub(super) fn of(subject: &Subject) -> Grid {
        let lines = lines(subject);
        let columns = lines.iter().map(|line| line.columns).max().unwrap_or(0);
        let columns_per_cell = columns.div_ceil(COLUMNS_MAX).max(1);
        let lines_per_row = lines.len().div_ceil(ROWS_MAX).max(1);
        let layers = lines.iter().map(|line| line.layers.len()).max().unwrap_or(0).max(1);
        let mut totals = Sum::default();
        let rows = lines.chunks(lines_per_row).map(|some| {
            let cells = usize::try_from(columns.div_ceil(columns_per_cell)).unwrap_or(0);
            let mut cells = vec![Sum::default(); cells];
            for line in some {
                fold(line, subject.page_tokens, columns_per_cell, &mut cells, &mut totals);
            }
            Row { label: label(some), cells }
        });
        let rows = rows.collect();
        Grid {
            rows,
            lines: lines.len(),
            columns,
            pages_per_cell: columns_per_cell.saturating_mul((lines_per_row * layers) as u64),
            totals,
        }
    }
}

fn label(lines: &[Line<'_>]) -> String {
    match lines {
        [] => String::new(),
        [line] => line.label.clone(),
        [first, .., last] => format!("{}..{}", first.label, last.label),
    }
}

/// Adds the pages of a line to its cells, and what is missing among them.
fn fold(line: &Line<'_>, page_tokens: u64, per_cell: u64, cells: &mut [Sum], totals: &mut Sum) {
    for layer in &line.layers {
        let mut last = None;
        let mut present = vec![0; cells.len()];
        for page in &layer.pages {
            let column = column(page, page_tokens);
            let at = usize::try_from(column / per_cell).unwrap_or(usize::MAX);
            let Some(cell) = cells.get_mut(at) else { continue };
            cell.add(page);
            totals.add(page);
            // A page and the tail that it takes the place of are there together for a moment.
            present[at] += u64::from(last != Some(column));
            last = Some(column);
        }
        if !layer.keeps_pages {
            continue;
        }
        for ((at, cell), present) in (0..).zip(cells.iter_mut()).zip(present) {
            let begin = per_cell.saturating_mul(at);
            let wanted = line.columns.saturating_sub(begin).min(per_cell);
            let absent = wanted.saturating_sub(present);
            cell.absent += absent;
            totals.absent = totals.absent.saturating_add(absent);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn layer(layer: u32, lines: &[&str]) -> LayerPages {
        let pages = lines.iter().map(|line| Page::parse(line).unwrap()).collect();
        LayerPages { layer, keeps_pages: true, pages }
    }

    pub(in super::super) fn page(number: u64, rest: &str) -> String {
        format!("{:07}.safetensors {rest}", number * 16)
    }

    pub(in super::super) fn sequence(layers: Vec<LayerPages>) -> Subject {
        let path = "/mnt/models/m/sequences/a".to_owned();
        Subject { path, page_tokens: 16, content: Content::Sequence(layers) }
    }

    fn many(pages: u64, place: &str) -> LayerPages {
        let lines: Vec<_> = (0..pages).map(|n| page(n, &format!("{place} 10 5 1 -"))).collect();
        layer(0, &lines.iter().map(String::as_str).collect::<Vec<_>>())
    }

    #[test]
    fn few_pages_have_a_cell_each_and_holes_are_seen() {
        let lines = [page(0, "ram raw 10 5 1 pinned"), page(2, "ssd zst 10 7 2 -")];
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let grid = Grid::of(&sequence(vec![layer(0, &lines), layer(1, &lines[..1])]));
        let faces = |row: usize| grid.rows[row].cells.iter().map(Sum::face).collect::<Vec<_>>();
        let (memory, compressed) = (Face::Pages(Place::Memory), Face::Pages(Place::Compressed));
        assert_eq!(faces(0), [memory, Face::Absent, compressed]);
        assert_eq!(faces(1), [memory, Face::Absent, Face::Absent]);
        let totals = &grid.totals;
        assert_eq!((totals.pinned, totals.shared, totals.absent), (2, 1, 3));
        assert_eq!((totals.used_seconds, grid.pages_per_cell), (7, 1));
    }

    #[test]
    fn many_are_folded() {
        let mut layers: Vec<_> = (0..100).map(|_| many(1000, "ssd raw")).collect();
        for (number, layer) in layers.iter_mut().enumerate() {
            layer.layer = u32::try_from(number).unwrap();
        }
        layers[3].pages[17].place = Place::Damaged;
        let grid = Grid::of(&sequence(layers));
        assert_eq!((grid.rows.len(), grid.rows[0].cells.len()), (34, 63));
        assert_eq!(grid.pages_per_cell, 48);
        assert_eq!((&*grid.rows[0].label, &*grid.rows[33].label), ("000..002", "099"));
        // One damaged page among 48 is not hidden by the others.
        assert_eq!(grid.rows[1].cells[1].face(), Face::Pages(Place::Damaged));
        assert_eq!(grid.totals.pages.iter().sum::<u64>(), 100_000);
        assert_eq!(grid.totals.absent, 0);
    }

    #[test]
    fn a_page_at_the_end_of_the_world_takes_no_memory() {
        let far = format!("{}.safetensors ssd raw 1 1 1 -", u64::MAX / 16 * 16);
        let grid = Grid::of(&sequence(vec![layer(0, &[&far])]));
        assert!(grid.rows[0].cells.len() <= 64);
        assert_eq!(grid.rows[0].cells[0].face(), Face::Absent);
    }

    #[test]
    fn sequences_of_a_model_come_in_the_order_of_their_use() {
        let of = |used: u32| {
            let line = page(0, &format!("ssd raw 10 {used} 1 -"));
            vec![layer(0, &[&line]), layer(1, &[&line])]
        };
        let sequences =
            [("a", 5), ("b", 9), ("c", 5)].map(|(name, used)| (name.to_owned(), of(used)));
        let content = Content::Model(sequences.into());
        let grid = Grid::of(&Subject { path: "/m".to_owned(), page_tokens: 16, content });
        let labels: Vec<_> = grid.rows.iter().map(|row| &*row.label).collect();
        assert_eq!(labels, ["b", "a", "c"]);
        assert_eq!((grid.pages_per_cell, grid.rows[0].cells.len()), (2, 1));
    }

    #[test]
    fn recurrent_layers_have_no_holes() {
        let mut states = layer(0, &["state-0000048.safetensors ssd raw 1 1 1 -"]);
        states.keeps_pages = false;
        let grid = Grid::of(&sequence(vec![states]));
        let faces: Vec<_> = grid.rows[0].cells.iter().map(Sum::face).collect();
        assert_eq!(faces, [Face::Nothing, Face::Nothing, Face::Pages(Place::Disk)]);
    }
}
