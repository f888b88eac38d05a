//! How exact `kvfs what-if` is: what it tells from all uses of a trace, and from a sample of them.
//!
//! A block that is seen for the first time is a new page, any other use reads it.

use std::fmt::Write;

use super::read::Trace;
use crate::page::Dtype;
use crate::store::record::{ObjectId, PageRecord, Role};
use crate::tier::what_if::{Play, Sample, Seen};

/// What a block counts as.
const BLOCK_BYTES: u64 = 1 << 20;
/// What the columns are called.
const NAMES: [&str; 3] = ["replayed", "told", "told from 64 Ki"];

/// A line for each room and each tier.
pub(super) fn table(trace: &Trace, rooms: &[(f64, usize)]) -> String {
    // Room for all uses, that of a mount, and 65,536 records.
    let samples = [Sample::with_room(1 << 16, 0), Sample::default(), Sample::with_room(16, 1000)];
    let seen = samples.map(|sample| seen(trace, &sample));
    let mut text = format!(
        "{}: found with room for a share of the blocks, of all repeated uses\n",
        trace.name
    );
    // Writing to a String cannot fail.
    for (seen, name) in seen.iter().zip(NAMES) {
        let (uses, files) = (seen.uses, 1_u64 << seen.sampling_bits);
        let _ = writeln!(text, "{name}: the last {uses} uses, of one block in {files}");
    }
    let [replayed, told, few] = NAMES;
    let _ = writeln!(text, "{:<8}{:>8}{replayed:>12}{told:>12}{few:>18}", "tier", "room %");
    for (share, blocks) in rooms {
        let budget = *blocks as u64 * BLOCK_BYTES;
        for (name, play) in [("memory", Play::Memory(budget)), ("disk", Play::Disk(budget))] {
            let [replayed, told, few] = seen.each_ref().map(|seen| {
                let played = play.on(seen);
                let rough = if played.is_rough { "~" } else { "" };
                format!("{rough}{:.3}", played.found_share())
            });
            let _ = writeln!(text, "{name:<8}{share:>8}{replayed:>12}{told:>12}{few:>18}");
        }
    }
    text.push('\n');
    text
}

/// What a mount would have seen of a trace.
fn seen(trace: &Trace, sample: &Sample) -> Seen {
    let mut known = vec![false; trace.distinct];
    let page = PageRecord {
        model: [0; 16],
        layer: 0,
        start: 0,
        tokens: 0,
        dtype: Dtype::F16,
        checksum: [0; 16],
    };
    for block in trace.blocks() {
        let object = ObjectId(u64::from(*block));
        if std::mem::replace(&mut known[*block as usize], true) {
            sample.used(object, Some(Role::Page(page)), BLOCK_BYTES, false);
        } else {
            sample.came_to_be(object, Role::Page(page), BLOCK_BYTES);
        }
    }
    Seen::parse(&sample.to_bytes()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::read::trace_of;
    use super::*;

    #[test]
    fn what_is_told_stands_beside_what_is_replayed() {
        let trace = trace_of(&[&[1, 2, 3, 4], &[1, 2, 3, 4], &[1, 2]]);
        let text = table(&trace, &[(50.0, 2), (100.0, 4)]);
        assert!(text.contains("told: the last 6 uses, of one block in 1\n"), "{text}");
        let last = text.trim_end().lines().rev().nth(1).unwrap();
        assert_eq!(
            last.split_whitespace().collect::<Vec<_>>()[1..],
            ["100", "1.000", "1.000", "1.000"]
        );
        assert_eq!(text.matches("\nmemory").count(), 2, "{text}");
    }
}
