//! Many exchanges while programs use a mount in every way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::clients::{
    Done, append_tokens, calls, change_in_place, list, map, rewrite, write_by_rename,
};
use crate::common::model::Model;
use crate::common::sys::write_and_close;
use crate::common::{Mode, Mount, forks};
use crate::{exchanges, mounted, upgrade};

/// The longest that a call may take.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Of so many calls, at least, none may fail, and none take longer.
const CALLS_MIN: u64 = 10_000;
/// For how long they are waited for beyond the exchanges that were asked for.
const PATIENCE: Duration = Duration::from_secs(60);

fn wanted() -> usize {
    std::env::var("KVFS_EXCHANGES").map_or(10, |count| count.parse().unwrap())
}

fn run(mode: Mode) {
    let mut mount = mounted(mode, &[]);
    mount.may_be_slow("clients use both cores");
    let model = Model::small();
    model.install(&mount);
    let page = model.page_path(&mount, "mapped", 0, 0);
    std::fs::create_dir_all(page.parent().unwrap()).unwrap();
    let bytes = model.page(0, 0, 7);
    write_and_close(&page, &bytes).unwrap();
    let known = |mount: &Mount| (mount.status("pid"), mount.status("io_uring"));
    let before = known(&mount);
    let (over, count) = (AtomicBool::new(false), wanted());
    let done = use_meanwhile(&mount, &model, (&page, &bytes), &over, count);
    println!(
        "{mode:?}: {count} exchanges, {} calls, none failed, the longest took {:.0?}",
        done.calls, done.longest
    );
    assert!(exchanges(&mount) >= count);
    assert_eq!(known(&mount), before, "the process stays, and where its requests come from");
    assert!(done.calls >= CALLS_MIN, "only {} calls", done.calls);
    assert!(done.longest <= PAUSE_MAX, "{:?}", done.longest);
    assert!(mount.unmount().success());
    let mut fsck = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let checked = forks::output(fsck.arg("fsck").arg(mount.store()));
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

fn use_meanwhile(
    mount: &Mount, model: &Model, (page, bytes): (&std::path::Path, &[u8]), over: &AtomicBool,
    count: usize,
) -> Done {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let clients = [
            scope.spawn(|| write_by_rename(&mount.files("small"), 1000, over)),
            scope.spawn(|| write_by_rename(&mount.files("large"), 1 << 20, over)),
            scope.spawn(|| append_tokens(mount, model, over)),
            scope.spawn(|| change_in_place(&mount.files("in-place"), over)),
            scope.spawn(|| list(&mount.files("listed"), 500, over)),
            scope.spawn(|| map(page, bytes, over)),
        ];
        let exchanged = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut exchanged = 0;
            // Each failed call ends its client, and with that the test.
            while exchanged < count || calls() < CALLS_MIN && begun.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(200));
                upgrade(mount);
                exchanged += 1;
            }
        }));
        over.store(true, Ordering::Relaxed);
        let done = clients.map(|client| client.join().unwrap());
        exchanged.unwrap();
        done.into_iter().fold(Done::default(), Done::and)
    })
}

#[test]
fn no_call_fails_and_none_takes_long_where_the_kernel_reads_files() {
    crate::require!(fuse, root);
    run(Mode::Passthrough);
}

#[test]
fn no_call_fails_and_none_takes_long_where_the_daemon_reads_files() {
    crate::require!(fuse);
    run(Mode::Served);
}

/// A commit takes seconds where nobody slows them down.
#[test]
fn files_that_are_rewritten_as_fast_as_possible_keep_no_daemon() {
    crate::require!(fuse, root);
    let mut mount = mounted(Mode::Passthrough, &[]);
    mount.may_be_slow("clients use both cores");
    let over = AtomicBool::new(false);
    let done = std::thread::scope(|scope| {
        let clients = ["one", "other"].map(|name| {
            let (directory, over) = (mount.files(name), &over);
            scope.spawn(move || rewrite(&directory, 100_000, over))
        });
        let exchanged = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..3 {
                std::thread::sleep(Duration::from_secs(2));
                upgrade(&mount);
            }
        }));
        over.store(true, Ordering::Relaxed);
        let done = clients.map(|client| client.join().unwrap());
        exchanged.unwrap();
        done.into_iter().fold(Done::default(), Done::and)
    });
    assert!(done.longest <= PAUSE_MAX, "{:?}", done.longest);
}
