//! The rules of each policy, on uses that are easy to follow.

use super::super::hints::Hints;
use super::super::read::trace_of;
use super::super::replay::replay;
use super::all;

/// Blocks that each policy finds, by its name.
fn found(requests: &[&[u64]], room: usize) -> Vec<(&'static str, u64)> {
    let trace = trace_of(requests);
    let none = Hints::none();
    let outcomes = all(&trace, room).into_iter().map(|policy| replay(&trace, policy, &none));
    outcomes.map(|outcome| (outcome.policy, outcome.found)).collect()
}

fn of(found: &[(&str, u64)], name: &str) -> u64 {
    let found = found.iter().find(|(policy, _)| *policy == name);
    found.map(|(_, found)| *found).expect("there is such a policy")
}

#[test]
fn a_loop_longer_than_the_room() {
    let round: Vec<u64> = (0..150).collect();
    let found = found(&[round.as_slice(); 20], 100);
    assert_eq!(of(&found, "LRU"), 0);
    assert_eq!(of(&found, "ARC"), 0);
    assert_eq!(of(&found, "LRU, end first"), 19 * 100);
    assert!(of(&found, "LIRS") > 19 * 85, "{found:?}");
    assert!(of(&found, "kvfs") > 19 * 85, "{found:?}");
    assert_eq!(of(&found, "Belady"), 19 * 100);
}

#[test]
fn what_is_used_often_survives_a_scan() {
    let often: Vec<u64> = (0..50).collect();
    let scans: Vec<Vec<u64>> =
        (0..20).map(|scan| (1000 * scan + 1000..).take(150).collect()).collect();
    let mut requests: Vec<&[u64]> = vec![&often; 5];
    for scan in &scans {
        requests.extend([often.as_slice(), often.as_slice(), scan.as_slice()]);
    }
    let found = found(&requests, 100);
    let repeated = (requests.len() as u64 - 20 - 1) * 50;
    for name in ["kvfs", "LIRS", "decayed", "ARC", "S3-FIFO", "W-TinyLFU", "Belady"] {
        assert!(of(&found, name) > repeated * 9 / 10, "{found:?}");
    }
    assert!(of(&found, "LRU") < repeated * 7 / 10, "{found:?}");
}

#[test]
fn nothing_beats_the_optimum() {
    let mut state = 7_u64;
    let requests: Vec<Vec<u64>> = (0..300)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (branch, length) = (state >> 60, state >> 40 & 15);
            (0..length).map(|place| if place < 3 { place } else { branch * 100 + place }).collect()
        })
        .collect();
    let requests: Vec<&[u64]> = requests.iter().map(Vec::as_slice).collect();
    for room in [1, 2, 3, 10, 30, 100] {
        let found = found(&requests, room);
        let optimum = of(&found, "Belady");
        assert!(found.iter().all(|(_, found)| *found <= optimum), "{found:?}");
    }
}
