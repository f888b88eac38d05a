//! What a mask lets each query see.
//!
//! The mask is the engine's only word on causality, sequences, sliding windows and holes. Most are
//! simpler than they may be: each query sees one run of cells, each with 0. Then the runtime takes
//! a whole tile for many queries at once and reads no mask, so it pays to look first: 2 bytes for
//! each query and cell, against the rows of all KV heads.

use half::f16;

/// What the queries see of the cells.
#[derive(Debug, PartialEq)]
pub(super) enum Visible {
    /// Query `i` sees the cells from `first` to `last[i]`, and of those only the `window` last.
    Runs {
        /// Where the first run starts.
        first: usize,
        /// Of each query.
        last: Vec<u64>,
        /// Most cells of a run.
        window: Option<u64>,
    },
    /// What the mask says.
    Masked,
}

/// The cells that one query sees, if they are one run, each with 0: first and end.
fn run(row: &[f16]) -> Option<(usize, usize)> {
    let seen = |value: &f16| *value != f16::NEG_INFINITY;
    let first = row.iter().position(seen)?;
    let end = row.iter().rposition(seen)? + 1;
    // Without leaving early the compiler compares whole vectors; -0 is as good as 0.
    let bits = row[first..end].iter().fold(0, |bits, value| bits | (value.to_bits() & 0x7fff));
    (bits == 0).then_some((first, end))
}

/// Looks through a mask `[queries, cells]`.
pub(super) fn visible(mask: &[f16], cells: usize) -> Visible {
    let Some(runs) = mask.chunks_exact(cells).map(run).collect::<Option<Vec<_>>>() else {
        return Visible::Masked;
    };
    let Some(first) = runs.iter().map(|(first, _)| *first).min() else { return Visible::Masked };
    let window = runs.iter().map(|(first, end)| end - first).max().unwrap_or(0);
    let last = |(_, end): &(usize, usize)| (end - 1 - first) as u64;
    let is_window = |(from, end): &(usize, usize)| *from == first.max(end.saturating_sub(window));
    if runs.iter().all(|(from, _)| *from == first) {
        Visible::Runs { first, last: runs.iter().map(last).collect(), window: None }
    } else if runs.iter().all(is_window) {
        let window = Some(window as u64);
        Visible::Runs { first, last: runs.iter().map(last).collect(), window }
    } else {
        Visible::Masked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `.` is seen, `-` is not, `x` is seen with a bias; one word for each query.
    fn check(mask: &str, expected: Option<(usize, &[u64], Option<u64>)>) {
        let value = |letter| match letter {
            '.' => f16::ZERO,
            '-' => f16::NEG_INFINITY,
            _ => f16::from_f32(-0.5),
        };
        let cells = mask.split(' ').next().unwrap().len();
        let values: Vec<f16> = mask.chars().filter(|c| *c != ' ').map(value).collect();
        let expected = expected.map_or(Visible::Masked, |(first, last, window)| Visible::Runs {
            first,
            last: last.to_vec(),
            window,
        });
        assert_eq!(visible(&values, cells), expected, "{mask}");
    }

    #[test]
    fn what_masks_say() {
        check("...-----", Some((0, &[2], None)));
        check("--...---", Some((2, &[2], None)));
        check("...--- ....-- .....-", Some((0, &[2, 3, 4], None)));
        check("....", Some((0, &[3], None)));
        // A sliding window, also where it has just begun to slide.
        check("-..--- --..-- ---..-", Some((1, &[1, 2, 3], Some(2))));
        check(".----- ..---- -..---", Some((0, &[0, 1, 2], Some(2))));
        check("-..---- -...--- --...--", Some((1, &[1, 2, 3], Some(3))));
        check("..--- --..-", Some((0, &[1, 3], Some(2))));
        // Holes, other sequences, biases, queries that see nothing.
        check("..-.---", None);
        check("...-- --..-", None);
        check("..x--", None);
        check("----", None);
        check("..-- ----", None);
    }
}
