//! Ranges of positions, in the forms that operations take them.

use std::ops::{Bound, RangeBounds};

/// A range of positions.
pub(super) type Bounds = (Bound<u64>, Bound<u64>);

pub(super) fn bounds(positions: &impl RangeBounds<u64>) -> Bounds {
    (positions.start_bound().cloned(), positions.end_bound().cloned())
}

/// What lies before and behind some positions, where there may be anything.
pub(super) fn outside(positions: &impl RangeBounds<u64>) -> (Option<Bounds>, Option<Bounds>) {
    let before = match positions.start_bound() {
        Bound::Unbounded | Bound::Included(0) => None,
        Bound::Included(start) => Some(Bound::Excluded(*start)),
        Bound::Excluded(before) => Some(Bound::Included(*before)),
    };
    let behind = match positions.end_bound() {
        Bound::Unbounded => None,
        Bound::Included(last) => Some(Bound::Excluded(*last)),
        Bound::Excluded(end) => Some(Bound::Included(*end)),
    };
    (before.map(|end| (Bound::Unbounded, end)), behind.map(|start| (start, Bound::Unbounded)))
}
