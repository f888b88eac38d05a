use super::*;
use crate::reader::tests::Fixture;

fn limits(pages: usize, kept_pages: u64) -> Limits {
    Limits { pages, kept_bytes: kept_pages * Fixture::PAGE_BYTES }
}

fn key(index: u64) -> Key {
    Key { sequence: 7, layer: Layer(0), start: TokenStart(index * 16) }
}

/// Offers pages as a scan does, and returns how many were there.
fn scan(residents: &Residents, fixture: &Fixture, pages: u64) -> usize {
    residents.begin_scan();
    let hits = (0..pages).filter(|&index| {
        let is_there = residents.get(&key(index)).is_some();
        if !is_there {
            residents.offer(key(index), fixture.load(index));
        }
        is_there
    });
    hits.count()
}

#[test]
fn a_loop_over_more_than_fits_keeps_a_fixed_part() {
    let fixture = Fixture::new(1, 8, 0);
    for (limits, expected) in
        [(limits(100, 100), 8), (limits(5, 100), 5), (limits(100, 3), 3), (limits(0, 0), 0)]
    {
        let residents = Residents::new(limits);
        assert_eq!(scan(&residents, &fixture, 8), 0);
        for _ in 0..3 {
            assert_eq!(scan(&residents, &fixture, 8), expected);
            assert!(residents.pages() <= limits.pages);
            assert!(residents.kept_bytes() <= limits.kept_bytes);
        }
    }
}

#[test]
fn pages_that_nobody_uses_make_room() {
    let fixture = Fixture::new(1, 8, 0);
    let residents = Residents::new(limits(4, 100));
    assert_eq!(scan(&residents, &fixture, 2), 0);
    for _ in 0..IDLE_SCANS {
        residents.begin_scan();
        for index in 4..6 {
            if residents.get(&key(index)).is_none() {
                residents.offer(key(index), fixture.load(index));
            }
        }
    }
    // Full, and nobody has been idle for long enough.
    residents.offer(key(7), fixture.load(7));
    assert!(residents.get(&key(7)).is_none());
    residents.begin_scan();
    residents.offer(key(7), fixture.load(7));
    let there: Vec<u64> = (0..8).filter(|&index| residents.get(&key(index)).is_some()).collect();
    assert_eq!(there, [1, 4, 5, 7]);
}

#[test]
fn what_is_removed_is_not_counted() {
    let fixture = Fixture::new(1, 4, 0);
    let residents = Residents::new(limits(10, 10));
    scan(&residents, &fixture, 4);
    assert_eq!((residents.pages(), residents.kept_bytes()), (4, 4 * Fixture::PAGE_BYTES));
    residents.remove(&key(1));
    residents.remove(&key(1));
    // The same page, from two streams at once.
    residents.offer(key(2), fixture.load(2));
    assert_eq!((residents.pages(), residents.kept_bytes()), (3, 3 * Fixture::PAGE_BYTES));
    residents.forget(8);
    assert_eq!(residents.pages(), 3);
    residents.forget(7);
    assert_eq!((residents.pages(), residents.kept_bytes()), (0, 0));
    assert!(residents.state().order.is_empty());
}

#[test]
fn the_default_leaves_mappings_for_others() {
    let limits = Limits::default();
    let most = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let most: usize = most.trim().parse().unwrap();
    assert!(limits.pages > most / 2 && limits.pages <= most - most / 4);
    assert!(limits.kept_bytes > 0);
}
