//! What clients may hold of the daemon: so much each user, so much all users together. One who takes all
//! that he can get locks nobody else out.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A bound on something that clients hold until they close a file.
#[derive(Debug)]
pub(crate) struct Shares {
    of_each: u64,
    /// Of all users, and as much again of root.
    of_all: u64,
    taken: Mutex<HashMap<u32, u64>>,
}

/// What somebody holds; it goes back when this is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    shares: Arc<Shares>,
    user: u32,
    amount: u64,
}

impl Shares {
    pub(crate) fn new(of_each: u64, of_all: u64) -> Arc<Shares> {
        Arc::new(Shares { of_each, of_all, taken: Mutex::default() })
    }

    /// So much for a user, if he may have it.
    pub(crate) fn take(self: &Arc<Shares>, user: u32, amount: u64) -> Option<Share> {
        let mut share = Share { shares: Arc::clone(self), user, amount: 0 };
        share.grow(amount).then_some(share)
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<u32, u64>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Share {
    /// Takes more; whether there was so much.
    pub(crate) fn grow(&mut self, more: u64) -> bool {
        let Shares { of_each, of_all, .. } = *self.shares;
        let mut taken = self.shares.taken();
        let own = taken.get(&self.user).copied().unwrap_or(0).saturating_add(more);
        let fits = if self.user == 0 {
            own <= of_all
        } else {
            // As many users as hold something: a few.
            let users = taken.iter().filter(|(user, _)| **user != 0);
            let all: u64 = users.map(|(_, amount)| amount).sum();
            own <= of_each && all.saturating_add(more) <= of_all
        };
        if fits {
            taken.insert(self.user, own);
            self.amount += more;
        }
        fits
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.shares.taken();
        if let Some(own) = taken.get_mut(&self.user) {
            *own = own.saturating_sub(self.amount);
            if *own == 0 {
                taken.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_takes_the_share_of_another() {
        let shares = Shares::new(2, 5);
        let alice: Vec<_> = (0..2).map(|_| shares.take(7, 1).unwrap()).collect();
        assert!(shares.take(7, 1).is_none());
        let mut bob = shares.take(8, 1).unwrap();
        assert!(bob.grow(1) && !bob.grow(1));
        let _carol = shares.take(9, 1).unwrap();
        // All users together have what there is for them; root has as much again.
        assert!(shares.take(9, 1).is_none());
        let root = shares.take(0, 5).unwrap();
        assert!(shares.take(0, 1).is_none());
        drop((alice, root));
        assert!(shares.take(9, 1).is_some() && shares.take(0, 5).is_some());
        drop(bob);
        assert_eq!(shares.taken().len(), 1);
    }
}
