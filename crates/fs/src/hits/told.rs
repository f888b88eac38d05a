//! What was counted, as others read it.

use std::cmp::Reverse;
use std::fmt::Write;

use super::{Table, Tally, Use, rate};
use crate::core::Core;
use kvfs_storage::store::record::InodeId;

/// Models, and directories, that have a line of `.kvfs/status` each, those that were used most; the others have one together.
const LINES_MAX: usize = 16;

/// Seconds are told with one digit behind the point.
const TOLD_SECONDS_MIN: f64 = 0.05;

/// A model or directory, and what was asked of it.
struct Told {
    path: String,
    counted: Use,
    /// Tokens that its engine computes in a second, if somebody has told it.
    rate: Option<u32>,
}

/// Lines `model PATH: ...` and `directory PATH: ...`.
pub(crate) fn add_lines(core: &Core, text: &mut String) {
    let Tally { models, directories } = core.hits.tally().clone();
    // Writing to a String cannot fail.
    for Told { path, counted, rate } in told(core, models) {
        let Use { questions, asked_tokens, answered_tokens, names, names_found, .. } = counted;
        let Use { opens, restored_tokens, .. } = counted;
        let opening = counted.opening.as_secs_f64();
        let _ = write!(
            text,
            "model {path}: questions={questions} asked_tokens={asked_tokens} answered_tokens={answered_tokens} \
             prefixes={names} prefixes_found={names_found} opens={opens} restored_tokens={restored_tokens} \
             opening_seconds={opening:.3}"
        );
        if let Some(rate) = rate {
            let saved = saved(&counted, rate);
            let _ = write!(text, " prefill_rate={rate} saved_seconds={saved:.1}");
        }
        text.push('\n');
    }
    for Told { path, counted, .. } in told(core, directories) {
        let Use { names, names_found, opens, opened_bytes, .. } = counted;
        let _ = writeln!(
            text,
            "directory {path}: names={names} names_found={names_found} opens={opens} opened_bytes={opened_bytes}"
        );
    }
}

/// Seconds of computing that opened pages have saved, less the time of their opens, of all models of which somebody
/// has told how fast their engine is; `None` without one.
pub(crate) fn saved_seconds(core: &Core) -> Option<f64> {
    let models = core.hits.tally().models.known.clone();
    let of_one = |(id, counted): (InodeId, Use)| {
        let rate = rate::of(&core.state(), id)?;
        Some(saved(&counted, rate))
    };
    models.into_iter().filter_map(of_one).reduce(|sum, one| sum + one)
}

/// Negative where it took longer to open pages than to compute them.
fn saved(counted: &Use, rate: u32) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a number for people")]
    let computing = counted.restored_tokens as f64 / f64::from(rate);
    let saved = computing - counted.opening.as_secs_f64();
    // Nothing to be told of, and no minus in front of it.
    if saved.abs() < TOLD_SECONDS_MIN { 0.0 } else { saved }
}

/// Those that were used most, and one for all others: those that have no path any more among them.
fn told(core: &Core, table: Table) -> Vec<Told> {
    let mut known: Vec<(InodeId, Use)> = table.known.into_iter().collect();
    known.sort_by_key(|(_, counted)| Reverse(counted.times()));
    let (mut told, mut others) = (Vec::new(), table.others);
    for (id, counted) in known {
        // Only of these, and one at a time: requests want the lock, too.
        let path = (told.len() < LINES_MAX).then(|| path_of(core, id)).flatten();
        match path {
            Some(path) => told.push(Told { path, counted, rate: rate::of(&core.state(), id) }),
            None => others.add(&counted),
        }
    }
    if others.times() > 0 {
        told.push(Told { path: "others".to_owned(), counted: others, rate: None });
    }
    told
}

fn path_of(core: &Core, directory: InodeId) -> Option<String> {
    let path = core.state().directory_path(directory)?;
    Some(kvfs_page::printable(path.chars()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hits::{Area, PageOpen};
    use crate::unmounted::{FILES, Unmounted};
    use kvfs_page::Layer;
    use std::time::Duration;

    fn lines(unmounted: &Unmounted) -> Vec<String> {
        let mut text = String::new();
        add_lines(&unmounted.fs.core, &mut text);
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn seconds_are_told_where_somebody_has_said_how_fast_the_engine_is() {
        let unmounted = Unmounted::new();
        let model = unmounted.make_model(2).directory;
        let core = &unmounted.fs.core;
        let page = PageOpen { layer: Layer(0), tokens: 300, took: Duration::from_millis(500) };
        core.hits.note_page(core, Area::Model(model), 10, page);
        assert_eq!(saved_seconds(core), None);
        assert!(lines(&unmounted)[0].ends_with("restored_tokens=300 opening_seconds=0.500"));
        rate::set(core, model, b"100").unwrap();
        assert_eq!(saved_seconds(core), Some(2.5));
        assert!(lines(&unmounted)[0].ends_with(" prefill_rate=100 saved_seconds=2.5"));
    }

    #[test]
    fn those_that_were_used_most_come_first_and_nothing_is_lost() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        for number in 0..40_u64 {
            let name = format!("d{number}");
            let directory = unmounted.make_directory(FILES, &name, (0o755, 0));
            core.hits.note_names(Area::Directory(directory), [0, number + 1]);
        }
        // One that has no path any more.
        core.hits.note_names(Area::Directory(InodeId(1 << 40)), [1, 0]);
        let lines = lines(&unmounted);
        assert_eq!(lines.len(), LINES_MAX + 1);
        assert!(
            lines[0].starts_with("directory files/d39: names=40 names_found=0"),
            "{}",
            lines[0]
        );
        let rest: u64 = (1..=40 - LINES_MAX as u64).sum::<u64>() + 1;
        let others = format!("directory others: names={rest} names_found=1 ");
        assert!(lines[LINES_MAX].starts_with(&others), "{}", lines[LINES_MAX]);
    }
}
