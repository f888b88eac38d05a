//! A sequence is read while another thread writes it.

use std::time::{Duration, Instant};

use kvfs::page::Layer;
use kvfs::reader::ReadError;

use crate::common::Mode;
use crate::common::sys::{open, write};
use crate::prepared::{EVERYTHING, Prepared};

in_both_modes!(
    every_page_is_had_while_the_next_is_being_written,
    rows_of_a_tail_are_had_before_it_is_full,
    who_waits_in_vain_hears_of_it,
);

/// Two layers of pages of 8 KiB.
const SMALL: [u32; 4] = [2, 2, 16, 32];
const PATIENCE: Duration = Duration::from_secs(60);

fn every_page_is_had_while_the_next_is_being_written(mode: Mode) {
    let prepared = Prepared::new(mode, &[], SMALL);
    // Nobody has made the directory yet.
    let mut sequence = prepared.open(EVERYTHING, 1 << 20);
    assert_eq!(sequence.valid_tokens().unwrap(), 0);
    let (read, written) = std::sync::mpsc::sync_channel(0);
    std::thread::scope(|scope| {
        let prepared = &prepared;
        scope.spawn(move || {
            for start in (0..256).step_by(32) {
                for layer in 0..2 {
                    prepared.publish(layer, start, 0);
                    // The next one is written only when this one was read.
                    written.recv_timeout(PATIENCE).unwrap();
                }
            }
        });
        for end in (32..=256).step_by(32) {
            for layer in [Layer(0), Layer(1)] {
                assert_eq!(sequence.wait_for(layer, end, PATIENCE).unwrap(), end);
                let mut stream = sequence.stream_layers(&[layer], end - 32..end).unwrap();
                let run = stream.next_run().unwrap().unwrap();
                assert_eq!((run.layer(), run.tokens()), (layer, 32));
                assert!(stream.next_run().unwrap().is_none());
                drop(stream);
                read.send(()).unwrap();
            }
        }
    });
    prepared.check(&sequence, 256);
    // What was found before need not be looked for.
    assert_eq!(sequence.wait_for(Layer(0), 100, Duration::ZERO).unwrap(), 256);
}

fn rows_of_a_tail_are_had_before_it_is_full(mode: Mode) {
    const APPEND: i32 = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND;
    let prepared = Prepared::new(mode, &[], SMALL);
    prepared.fill(2, 0);
    let mut sequence = prepared.open(EVERYTHING, 1 << 20);
    for (from, to) in [(64, 70), (70, 96), (96, 101)] {
        for layer in 0..2 {
            let path = prepared.model.tail_path(&prepared.mount, "chat", layer, from / 32 * 32);
            write(&open(path, APPEND).unwrap(), &prepared.rows(layer, from, to - from, 0)).unwrap();
            assert_eq!(sequence.wait_for(Layer(layer), to, PATIENCE).unwrap(), to);
        }
        prepared.check(&sequence, to);
    }
}

fn who_waits_in_vain_hears_of_it(mode: Mode) {
    let mut prepared = Prepared::new(mode, &[], SMALL);
    prepared.fill(1, 3);
    let mut sequence = prepared.open(EVERYTHING, 1 << 20);
    let started = Instant::now();
    let longest = Duration::from_millis(30);
    assert_eq!(sequence.wait_for(Layer(1), 36, longest).unwrap(), 35);
    assert!(started.elapsed() >= longest);
    let outcome = sequence.wait_for(Layer(2), 1, longest);
    assert!(matches!(outcome, Err(ReadError::Arguments(_))), "{outcome:?}");
    prepared.mount.kill();
    let outcome = sequence.wait_for(Layer(0), 64, longest);
    assert!(matches!(outcome, Err(ReadError::Disconnected(_))), "{outcome:?}");
}
