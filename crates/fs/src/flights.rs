//! Work that several ask for is done once: whoever comes meanwhile waits for the same result.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, PoisonError};

use crate::sync::{Condvar, Mutex};

/// Work under way, by what it is about.
#[derive(Debug)]
pub(super) struct Flights<K, T>(Mutex<HashMap<K, Arc<Flight<T>>>>);

#[derive(Debug)]
struct Flight<T> {
    progress: Mutex<Progress<T>>,
    landed: Condvar,
}

#[derive(Debug)]
enum Progress<T> {
    UnderWay,
    Landed(T),
    /// Whoever did it panicked.
    Lost,
}

impl<K, T> Default for Flights<K, T> {
    fn default() -> Self {
        Flights(Mutex::new(HashMap::new()))
    }
}

impl<K: Copy + Eq + Hash, T: Clone> Flights<K, T> {
    /// Does `work`, or waits for whoever does some already. `None` if that one panicked.
    pub(super) fn share(&self, key: K, work: impl FnOnce() -> T) -> Option<T> {
        let (flight, is_first) = {
            let mut flights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let is_first = !flights.contains_key(&key);
            let flight = flights.entry(key).or_insert_with(|| {
                Arc::new(Flight {
                    progress: Mutex::new(Progress::UnderWay),
                    landed: Condvar::new(),
                })
            });
            (Arc::clone(flight), is_first)
        };
        if is_first {
            let mut landing = Landing { flights: self, key, flight, outcome: None };
            let outcome = work();
            landing.outcome = Some(outcome.clone());
            return Some(outcome);
        }
        let mut progress = flight.progress.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*progress {
                Progress::UnderWay => {}
                Progress::Landed(outcome) => return Some(outcome.clone()),
                Progress::Lost => return None,
            }
            progress = flight.landed.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The end of a flight, also by a panic: whoever waits for it is told.
struct Landing<'a, K: Copy + Eq + Hash, T> {
    flights: &'a Flights<K, T>,
    key: K,
    flight: Arc<Flight<T>>,
    outcome: Option<T>,
}

impl<K: Copy + Eq + Hash, T> Drop for Landing<'_, K, T> {
    fn drop(&mut self) {
        let landed = self.outcome.take().map_or(Progress::Lost, Progress::Landed);
        self.flights.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
        *self.flight.progress.lock().unwrap_or_else(PoisonError::into_inner) = landed;
        self.flight.landed.notify_all();
    }
}
