//! Pages that are replaced, removed, or whose mount is gone.

use kvfs::page::Layer;
use kvfs::reader::ReadError;

use crate::common::Mode;
use crate::prepared::{EVERYTHING, NOTHING, Prepared, compare};

in_both_modes!(
    what_is_loaded_outlives_the_daemon,
    a_daemon_that_dies_during_a_scan_is_an_error,
    a_replaced_page_is_noticed_and_the_old_one_stays_readable,
    a_removed_page_stays_readable_where_it_is_loaded,
);

/// One layer of pages of 128 KiB.
const MEDIUM: [u32; 4] = [1, 2, 64, 256];

fn what_is_loaded_outlives_the_daemon(mode: Mode) {
    let mut prepared = Prepared::new(mode, &["--ram", "64M"], MEDIUM);
    prepared.fill(8, 0);
    prepared.commit();
    let sequence = prepared.open(EVERYTHING, 1 << 20);
    prepared.check(&sequence, 2048);
    let half = prepared.open(NOTHING, 1 << 20);
    prepared.mount.kill();
    // Every byte of every page is touched: there is no signal.
    prepared.check(&sequence, 2048);
    assert!(matches!(half.stream(0..2048).unwrap().next_run(), Err(ReadError::Disconnected(_))));
    assert!(matches!(sequence.report(), Err(ReadError::Disconnected(_))));
    let again = kvfs::reader::Sequence::open(&prepared.sequence());
    assert!(matches!(again, Err(ReadError::Disconnected(_))), "{again:?}");
    drop((sequence, half));
    prepared.mount.mount();
    prepared.check(&prepared.open(EVERYTHING, 1 << 20), 2048);
}

fn a_daemon_that_dies_during_a_scan_is_an_error(mode: Mode) {
    let mut prepared = Prepared::new(mode, &[], MEDIUM);
    prepared.fill(60, 0);
    prepared.commit();
    let tokens = 60 * 256;
    let sequence = prepared.open(NOTHING, 1 << 20);
    let mut stream = sequence.stream(0..tokens).unwrap();
    let run = stream.next_run().unwrap().unwrap();
    prepared.mount.kill();
    let read: usize = run
        .blocks()
        .iter()
        .map(|block| block.k.bytes.iter().filter(|byte| **byte != 0).count())
        .sum();
    assert!(read > 0);
    let error = loop {
        match stream.next_run() {
            Ok(Some(_)) => {}
            outcome => break outcome,
        }
    };
    assert!(matches!(error, Err(ReadError::Disconnected(_))), "{error:?}");
    drop((run, stream));
    drop(sequence);
    prepared.mount.mount();
}

fn a_replaced_page_is_noticed_and_the_old_one_stays_readable(mode: Mode) {
    let prepared = Prepared::new(mode, &["--ram", "64M"], MEDIUM);
    prepared.fill(4, 0);
    let mut sequence = prepared.open(EVERYTHING, 1 << 20);
    let mut other = prepared.open(NOTHING, 1 << 20);
    prepared.check(&sequence, 1024);
    prepared.publish(0, 512, 1);
    // The bytes that were loaded are those of the old page, all of them.
    prepared.check(&sequence, 1024);
    let mut stream = other.stream(0..1024).unwrap();
    let error = prepared.attend(&mut stream, 1024).unwrap_err();
    let path = prepared.page_path(0, 512);
    assert!(matches!(&error, ReadError::Changed(changed) if *changed == path), "{error}");
    assert!(prepared.attend(&mut stream, 1024).is_err());
    drop(stream);
    let expected = prepared.reference(Layer(0), 1024, |start| u64::from(start == 512));
    for sequence in [&mut sequence, &mut other] {
        sequence.refresh().unwrap();
        let mut stream = sequence.stream(0..1024).unwrap();
        compare(&prepared.attend(&mut stream, 1024).unwrap(), &expected);
    }
}

fn a_removed_page_stays_readable_where_it_is_loaded(mode: Mode) {
    let prepared = Prepared::new(mode, &["--ram", "64M"], MEDIUM);
    prepared.fill(4, 0);
    let mut sequence = prepared.open(EVERYTHING, 1 << 20);
    prepared.check(&sequence, 1024);
    std::fs::remove_file(prepared.page_path(0, 512)).unwrap();
    prepared.check(&sequence, 1024);
    sequence.refresh().unwrap();
    let error = sequence.stream(0..1024).unwrap_err();
    assert_eq!(error.to_string(), "layer 0: the page with token 512 is missing: compute it again");
    prepared.check(&sequence, 512);
}
