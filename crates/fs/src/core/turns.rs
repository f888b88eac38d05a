//! Turns: one thread seals under a name, another that needs the name waits for it.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::attributes::Place;

/// Names that can be sealed at the same time; more than any machine has cores for.
const TURNS: usize = 64;

/// Which names are being sealed, by a hash of the name.
#[derive(Debug)]
pub(crate) struct SealingTurns([Mutex<()>; TURNS]);

impl SealingTurns {
    pub(crate) const fn new() -> SealingTurns {
        SealingTurns([const { Mutex::new(()) }; TURNS])
    }

    /// Held while something is sealed under a name.
    pub(crate) fn take(&self, place: &Place) -> MutexGuard<'_, ()> {
        self.of(place).lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether something is sealed under a name at this moment, or under one that takes turns with it.
    pub(crate) fn is_taken(&self, place: &Place) -> bool {
        matches!(self.of(place).try_lock(), Err(TryLockError::WouldBlock))
    }

    fn of(&self, place: &Place) -> &Mutex<()> {
        let hash = twox_hash::XxHash3_64::oneshot_with_seed(place.parent.0, &place.name);
        &self.0[usize::from(hash.to_le_bytes()[0]) % TURNS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvfs_storage::store::record::InodeId;

    #[test]
    fn a_turn_is_taken_until_it_ends() {
        let turns = SealingTurns::new();
        let place = |name: &[u8]| Place { parent: InodeId::ROOT, name: name.to_vec() };
        let turn = turns.take(&place(b"a"));
        assert!(turns.is_taken(&place(b"a")));
        let is_free = |name: u8| !turns.is_taken(&place(&[name]));
        assert!((b'b'..=b'z').any(is_free));
        drop(turn);
        assert!(!turns.is_taken(&place(b"a")));
    }

    #[test]
    fn names_spread_over_all_turns() {
        let turns = SealingTurns::new();
        let held: Vec<_> = (0..4096_u32)
            .filter_map(|number| {
                let name = number.to_le_bytes().to_vec();
                let place = Place { parent: InodeId::ROOT, name };
                (!turns.is_taken(&place)).then(|| turns.of(&place).lock().unwrap())
            })
            .collect();
        assert_eq!(held.len(), TURNS);
    }
}
