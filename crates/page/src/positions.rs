//! `positions.json`: where the rows of a sequence stand, after tokens were removed or moved.
//!
//! A row is what a page or a tail keeps of one token; it never changes, and its number is its place
//! in the files. Its *position* is what the model knows it by. They are the same until somebody
//! removes tokens from the middle or moves some; then this file says, for each run of rows, where it
//! stands and how far it has moved since its K was rotated. Rows in no run are holes. A sequence
//! without the file is as it was written.

use std::ops::{Bound, Range, RangeBounds};

use serde::{Deserialize, Serialize};

use super::PageError;
use super::error::one_line;

/// The format that this program writes, and the only one it reads.
const SCHEMA_VERSION: u64 = 1;

/// Most runs. Only [`Positions::divide`] makes many, one of each token: a million tokens.
const RUNS_MAX: usize = 1 << 20;

/// Largest file: each run takes up to 80 bytes.
pub const MAX_POSITIONS_BYTES: usize = RUNS_MAX * 80;

/// No token stands here or behind: what JSON readers of other languages still read exactly.
const POSITION_END: u64 = 1 << 53;

/// Consecutive rows at consecutive positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "(u64, u64, u64, i64)", from = "(u64, u64, u64, i64)")]
pub struct Run {
    /// The first row.
    pub row: u64,
    /// How many.
    pub tokens: u64,
    /// Position of the first row.
    pub position: u64,
    /// That position less the one that its K was rotated for.
    pub shift: i64,
}

impl From<(u64, u64, u64, i64)> for Run {
    fn from((row, tokens, position, shift): (u64, u64, u64, i64)) -> Self {
        Self { row, tokens, position, shift }
    }
}

impl From<Run> for (u64, u64, u64, i64) {
    fn from(run: Run) -> Self {
        (run.row, run.tokens, run.position, run.shift)
    }
}

impl Run {
    /// Its positions.
    pub fn positions(&self) -> Range<u64> {
        self.position..self.position + self.tokens
    }

    /// Its rows.
    pub fn rows(&self) -> Range<u64> {
        self.row..self.row + self.tokens
    }

    /// The tokens from the `start`th to before the `end`th.
    fn slice(&self, start: u64, end: u64) -> Self {
        let (row, position) = (self.row + start, self.position + start);
        Self { row, tokens: end - start, position, shift: self.shift }
    }

    /// What lies before, in and behind some positions.
    fn split(&self, positions: &Range<u64>) -> [Self; 3] {
        let cut = |position: u64| position.clamp(self.position, self.positions().end);
        let start = cut(positions.start) - self.position;
        let end = (cut(positions.end) - self.position).max(start);
        [self.slice(0, start), self.slice(start, end), self.slice(end, self.tokens)]
    }

    /// Whether its rows stand where they were written.
    fn is_plain(&self) -> bool {
        self.row == self.position && self.shift == 0
    }
}

/// Where the rows of a sequence stand.
///
/// ```
/// use kvfs_page::Positions;
///
/// let mut positions = Positions::default();
/// // A context of 4096 tokens is full: keep the first four, drop the next 1020, move the rest up.
/// positions.remove(4096, 4..1024);
/// positions.add(4096, 1024.., -1020)?;
/// let runs: Vec<_> = positions.within(0..4096).map(|run| (run.row, run.position, run.shift)).collect();
/// assert_eq!(runs, [(0, 0, 0), (1024, 4, -1020)]);
/// // The next token.
/// assert_eq!(positions.within(4096..4097).next().unwrap().position, 3076);
/// # Ok::<(), kvfs_page::PageError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Positions {
    /// In the order of rows.
    runs: Vec<Run>,
    /// Row and position of what is appended from now on; its K is rotated for that position.
    next: (u64, u64),
    /// Rows from here on were computed after an edit, so tokens alone do not say what they are.
    edited_at: u64,
}

/// The file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    schema_version: u64,
    edited_at: u64,
    #[serde(deserialize_with = "bounded")]
    runs: Vec<Run>,
    next: (u64, u64),
}

/// Runs up to [`RUNS_MAX`]: a file of the longest size has room for eight times as many short ones, which would
/// take four times its bytes before they could be counted.
fn bounded<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<Run>, D::Error> {
    struct Bounded;

    impl<'de> serde::de::Visitor<'de> for Bounded {
        type Value = Vec<Run>;

        fn expecting(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(to, "up to {RUNS_MAX} runs")
        }

        fn visit_seq<A: serde::de::SeqAccess<'de>>(
            self, mut from: A,
        ) -> Result<Vec<Run>, A::Error> {
            let mut runs = Vec::new();
            while let Some(run) = from.next_element()? {
                if runs.len() == RUNS_MAX {
                    return Err(serde::de::Error::invalid_length(RUNS_MAX + 1, &self));
                }
                runs.push(run);
            }
            Ok(runs)
        }
    }

    from.deserialize_seq(Bounded)
}

impl Default for Positions {
    /// Rows where they were written.
    fn default() -> Self {
        Self { runs: Vec::new(), next: (0, 0), edited_at: u64::MAX }
    }
}

impl Positions {
    /// Reads `positions.json`.
    ///
    /// # Errors
    /// [`PageError::Positions`] says what is wrong.
    pub fn parse(json: &[u8]) -> Result<Self, PageError> {
        #[derive(Deserialize)]
        struct Version {
            schema_version: u64,
        }
        let refused = |why: String| PageError::Positions(format!("positions.json {why}"));
        let malformed =
            |error: serde_json::Error| refused(format!("cannot be read: {}", one_line(&error)));
        if json.len() > MAX_POSITIONS_BYTES {
            return Err(refused(format!(
                "is {} bytes, the limit is {MAX_POSITIONS_BYTES}",
                json.len()
            )));
        }
        let Version { schema_version: found } = serde_json::from_slice(json).map_err(malformed)?;
        if found != SCHEMA_VERSION {
            return Err(refused(format!(
                "has schema_version {found}, this program reads {SCHEMA_VERSION}: upgrade to use it"
            )));
        }
        let file: File = serde_json::from_slice(json).map_err(malformed)?;
        let mut positions = Self { runs: Vec::new(), next: file.next, edited_at: file.edited_at };
        let mut row = 0;
        for run in file.runs {
            let end = run.row.checked_add(run.tokens).filter(|end| *end <= file.next.0);
            let rotated = i64::try_from(run.position).ok().and_then(|at| at.checked_sub(run.shift));
            let is_sane = run.row >= row
                && run.tokens > 0
                && fits(run.position, run.tokens)
                && rotated.is_some_and(|at| at >= 0);
            let Some(end) = end.filter(|_| is_sane) else {
                return Err(refused(format!("has a run that cannot be: {run:?}")));
            };
            row = end;
            positions.push(run);
        }
        if file.next.0.max(file.next.1) >= POSITION_END || positions.runs.len() > RUNS_MAX {
            return Err(refused("says that tokens stand where none can".to_owned()));
        }
        Ok(positions)
    }

    /// The file's text; `None` if every row stands where it was written, which needs no file.
    pub fn to_json(&self) -> Option<String> {
        if self.is_plain() {
            return None;
        }
        let runs = self.runs.clone();
        let file = File {
            schema_version: SCHEMA_VERSION,
            edited_at: self.edited_at.min(self.next.0),
            runs,
            next: self.next,
        };
        let mut json = serde_json::to_string(&file).expect("every field is a number");
        json.push('\n');
        Some(json)
    }

    /// Whether every row, also of those to come, stands where it was written.
    pub fn is_plain(&self) -> bool {
        self.edited_at == u64::MAX
            && self.starts_plain() == self.next.0
            && self.next.0 == self.next.1
    }

    /// Rows from the first that are what their tokens make them, and stand where these say: what
    /// may be found by a prefix.
    pub fn prefix_rows(&self) -> u64 {
        let plain = self.starts_plain();
        if plain == self.next.0 && self.next.0 == self.next.1 {
            self.edited_at
        } else {
            plain.min(self.edited_at)
        }
    }

    /// Rows from here on were computed after an edit.
    pub fn edited_at(&self) -> u64 {
        self.edited_at
    }

    /// Rows that the runs are about; those behind stand where they are appended.
    pub fn closed_rows(&self) -> u64 {
        self.next.0
    }

    /// Closed rows from the first that stand where they were written.
    fn starts_plain(&self) -> u64 {
        self.runs.first().filter(|run| run.row == 0 && run.is_plain()).map_or(0, |run| run.tokens)
    }

    /// The runs of some rows, in their order, cut to them.
    pub fn within(&self, rows: Range<u64>) -> impl Iterator<Item = Run> + '_ {
        let (row, position) = self.next;
        let appended = Run { row, tokens: POSITION_END - row.max(position), position, shift: 0 };
        let first = self.runs.partition_point(|run| run.rows().end <= rows.start);
        let runs = self.runs[first..].iter().copied().chain([appended]);
        runs.take_while(move |run| run.row < rows.end).filter_map(move |run| {
            let start = rows.start.max(run.row) - run.row;
            let end = rows.end.min(run.rows().end).saturating_sub(run.row);
            (start < end).then(|| run.slice(start, end))
        })
    }

    /// Whether some rows have one that is no hole.
    pub fn has_any(&self, rows: Range<u64>) -> bool {
        self.within(rows).next().is_some()
    }

    /// First and last position of the first `rows` rows; `None` without any.
    pub fn ends(&self, rows: u64) -> Option<(u64, u64)> {
        self.within(0..rows).fold(None, |ends, run| {
            let Range { start, end } = run.positions();
            let (least, most) = ends.unwrap_or((start, end - 1));
            Some((least.min(start), most.max(end - 1)))
        })
    }

    /// The row behind the last one that is no hole, of the first `rows`.
    pub fn end_row(&self, rows: u64) -> u64 {
        self.within(0..rows).last().map_or(0, |run| run.rows().end)
    }

    /// Forgets all but the first `rows` rows, the number that there are from now on.
    pub fn truncate(&mut self, rows: u64) {
        self.edit(rows, |run| vec![run]);
        if self.starts_plain() == rows && self.edited_at >= rows {
            self.edited_at = u64::MAX;
        }
    }

    /// Removes the tokens that stand at some positions (`llama_memory_seq_rm`); the sequence has
    /// `rows` rows. Those at its end only become holes: [`truncate`](Self::truncate) forgets them.
    pub fn remove(&mut self, rows: u64, positions: impl RangeBounds<u64>) {
        let positions = range(&positions);
        if self.within(0..rows).all(|run| run.split(&positions)[1].tokens == 0) {
            // Nothing is removed, so what comes next is still what the tokens before make it.
            return;
        }
        self.edit(rows, |run| {
            let [before, _, behind] = run.split(&positions);
            vec![before, behind]
        });
        self.edited_at = self.edited_at.min(rows);
    }

    /// Moves the tokens that stand at some positions by `delta` (`llama_memory_seq_add`). Those that
    /// would stand before position 0 are removed.
    ///
    /// # Errors
    /// [`PageError::Positions`] if some would stand too far behind; nothing has changed then.
    pub fn add(
        &mut self, rows: u64, positions: impl RangeBounds<u64>, delta: i64,
    ) -> Result<(), PageError> {
        let positions = range(&positions);
        let move_by = |run: Run| {
            let lost = delta.unsigned_abs().saturating_sub(run.position).min(run.tokens);
            let run = run.slice(if delta < 0 { lost } else { 0 }, run.tokens);
            let position = run.position.saturating_add_signed(delta);
            Run { position, shift: run.shift.saturating_add(delta), ..run }
        };
        let mut moved = self.clone();
        moved.edit(rows, |run| {
            let [before, inside, behind] = run.split(&positions);
            let inside = if inside.tokens > 0 { move_by(inside) } else { inside };
            vec![before, inside, behind]
        });
        self.accept(moved, rows)
    }

    /// Divides the positions of the tokens that stand at some of them, rounding down
    /// (`llama_memory_seq_div`). Each token becomes a run of its own, since no two of them move by
    /// the same.
    ///
    /// # Errors
    /// [`PageError::Positions`] for a divisor of 0, and where there would be more than a million runs;
    /// nothing has changed then.
    pub fn divide(
        &mut self, rows: u64, positions: impl RangeBounds<u64>, divisor: u64,
    ) -> Result<(), PageError> {
        if divisor == 0 {
            return Err(PageError::Positions("positions cannot be divided by 0".to_owned()));
        }
        let positions = range(&positions);
        let inside = |run: &Run| run.split(&positions)[1].tokens;
        let tokens: u64 = self.within(0..rows).map(|run| inside(&run)).sum();
        if tokens.saturating_add(self.runs.len() as u64) > RUNS_MAX as u64 {
            return Err(PageError::Positions(format!(
                "dividing the positions of {tokens} tokens gives more than {RUNS_MAX} runs"
            )));
        }
        let mut divided = self.clone();
        divided.edit(rows, |run| {
            let [before, inside, behind] = run.split(&positions);
            let each = (0..inside.tokens).map(|token| {
                let run = inside.slice(token, token + 1);
                let position = run.position / divisor;
                let moved = (run.position - position).cast_signed();
                Run { position, shift: run.shift - moved, ..run }
            });
            [before].into_iter().chain(each).chain([behind]).collect()
        });
        self.accept(divided, rows)
    }

    fn accept(&mut self, mut changed: Self, rows: u64) -> Result<(), PageError> {
        if let Some(run) = changed.runs.iter().find(|run| !fits(run.position, run.tokens)) {
            let why = format!("tokens cannot stand at position {} and behind", run.position);
            return Err(PageError::Positions(why));
        }
        changed.edited_at = changed.edited_at.min(rows);
        *self = changed;
        Ok(())
    }

    /// Puts others in the place of each run of the first `rows` rows. What is appended from now on
    /// stands behind the last position.
    fn edit(&mut self, rows: u64, change: impl Fn(Run) -> Vec<Run>) {
        let old: Vec<Run> = self.within(0..rows).collect();
        self.runs.clear();
        for run in old.into_iter().flat_map(change) {
            self.push(run);
        }
        self.next = (
            rows,
            self.runs.iter().map(|run| run.position.saturating_add(run.tokens)).max().unwrap_or(0),
        );
    }

    /// Adds a run behind the others, as a part of the last one if it goes on where that ends.
    fn push(&mut self, run: Run) {
        if run.tokens == 0 {
            return;
        }
        match self.runs.last_mut() {
            Some(last)
                if last.rows().end == run.row
                    && last.shift == run.shift
                    && last.positions().end == run.position =>
            {
                last.tokens += run.tokens;
            }
            _ => self.runs.push(run),
        }
    }
}

fn fits(position: u64, tokens: u64) -> bool {
    position.checked_add(tokens).is_some_and(|end| end < POSITION_END)
}

fn range(positions: &impl RangeBounds<u64>) -> Range<u64> {
    let start = match positions.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match positions.end_bound() {
        Bound::Included(last) => last.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => u64::MAX,
    };
    start..end.max(start)
}

#[cfg(test)]
mod tests;
