//! An object store that lies, or gives a byte now and then: who waits for it does so for a bounded time.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::mount::scratch_directory;
use crate::common::s3_server::SETTLED_WITHIN;
use crate::common::s3_stub::{Answer, Request, Stub};
use crate::common::sys::{setxattr, write_and_close};
use crate::common::{Mode, Mount, eventually, fill, forks, within};
use crate::place::{complaint, tier};

const REMOTE: &str = "s3://bucket/some/prefix";
/// What a mount of a new store waits, and what a busy machine takes besides.
const WAITED_MAX: Duration = Duration::from_secs(36);
const BYTE_EVERY: Duration = Duration::from_millis(500);

fn mount(stub: &Stub, further: &[&str]) -> Mount {
    let options = ["--remote", REMOTE, "--commit-interval", "0.05"];
    let options = [&options[..], further].concat();
    Mount::with_environment(Mode::Passthrough, &options, stub.environment())
}

/// Has a store publish some names, and end.
fn publish(stub: &Stub) {
    let mut mount = mount(stub, &["--rebuild-from", "none"]);
    for number in 0..4 {
        write_and_close(mount.files(format!("f{number}")), &fill(number, 100_000)).unwrap();
    }
    eventually("the names", || (mount.status("remote_names") == "published").then_some(()));
    assert!(mount.unmount().success());
    assert_eq!(mount.try_status("pid"), None);
}

/// Mounts a new store there; returns when that is done, or failed.
fn mount_new(stub: &Stub, directory: &Path, further: &[&str]) -> (Output, Duration) {
    let [store, target] = ["store", "mnt"].map(|name| directory.join(name));
    std::fs::create_dir_all(&target).unwrap();
    let log = directory.join("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["mount", "--remote", REMOTE, "--log"]).arg(log).args(further);
    command.arg(store).arg(target).envs(stub.environment());
    let start = Instant::now();
    (forks::output(&mut command), start.elapsed())
}

/// A new store is mounted while this is how it is answered, and is not.
fn refused(stub: &Stub, rule: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> String {
    let stub = stub.copy();
    stub.answer(rule);
    let directory = scratch_directory();
    let (output, took) = mount_new(&stub, directory.path(), &[]);
    let line = complaint(&output);
    assert!(took < WAITED_MAX, "{took:?}: {line}");
    assert_eq!(line.trim_end().lines().count(), 1, "{line}");
    assert!(line.contains(REMOTE) && line.contains("none"), "{line}");
    // Nothing is in the way of beginning without.
    stub.is_honest_again();
    let (output, _) = mount_new(&stub, directory.path(), &["--rebuild-from", "none"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    forks::succeed(command.arg("umount").arg(directory.path().join("mnt")));
    line
}

#[test]
fn a_new_store_waits_half_a_minute_at_most() {
    crate::require!(fuse, root);
    let stub = Stub::start();
    publish(&stub);
    let id = stub.keys("/names/")[0].split('/').nth_back(1).unwrap().to_owned();
    std::thread::scope(|scope| {
        let (stub, id) = (&stub, &id);
        scope.spawn(move || {
            let drips = |request: &Request| Answer::Drip(BYTE_EVERY).when(request.lists("names"));
            let line = refused(stub, drips);
            assert!(line.contains("list names gave"), "{line}");
            assert!(line.contains("which is slower than 16 KiB/s"), "{line}");
        });
        scope.spawn(move || {
            let goes_on = |request: &Request| Answer::Empty.when(request.lists("names"));
            let line = refused(stub, goes_on);
            assert!(line.contains("no part of it came whole within 25 s"), "{line}");
        });
        scope.spawn(move || {
            let goes_on = |request: &Request| Answer::Endless.when(request.lists("names"));
            let line = refused(stub, goes_on);
            let is_told = line.contains("has more than 262144 names")
                || line.contains("did not tell within 30 s which stores have names there");
            assert!(is_told, "{line}");
        });
        scope.spawn(move || {
            let drips = |request: &Request| Answer::Drip(BYTE_EVERY).when(request.gets("/names/"));
            let line = refused(stub, drips);
            assert!(line.contains(&format!("get names/{id}/")), "{line}");
            assert!(line.contains("which is slower than 16 KiB/s"), "{line}");
        });
    });
}

#[test]
fn whoever_names_a_store_waits_until_its_names_are_there() {
    crate::require!(fuse, root);
    let stub = Stub::start();
    publish(&stub);
    let id = stub.keys("/names/")[0].split('/').nth_back(1).unwrap().to_owned();
    let far_away = |request: &Request| {
        let is_of_names = request.lists("names") || request.lists("blobs");
        Answer::After(Duration::from_secs(7))
            .when(is_of_names || request.gets("/names/") || request.gets("/chunks/"))
    };
    std::thread::scope(|scope| {
        let stub = &stub;
        scope.spawn(|| {
            let line = refused(stub, far_away);
            assert!(line.contains("did not come within 30 s"), "{line}");
        });
        let stub = stub.copy();
        stub.answer(far_away);
        let directory = scratch_directory();
        let (output, took) = mount_new(&stub, directory.path(), &["--rebuild-from", &id]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(took > Duration::from_secs(30), "{took:?}");
        stub.is_honest_again();
        let target = directory.path().join("mnt");
        let log = std::fs::read_to_string(directory.path().join("log")).unwrap();
        assert!(log.contains(&format!("rebuilt from the names of store {id}")), "{log}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        forks::succeed(command.arg("umount").arg(target));
    });
}

/// Opens that get a byte now and then: twice as many as there are calls at a time.
const DRIPPING: u64 = 16;
/// Bytes per second that one of them has on a link that is slow and honest.
const LINK_SHARE: usize = 48 << 10;
/// They are given up after 15 s, eight at a time.
const HELD_MAX: Duration = Duration::from_secs(33);

#[test]
fn files_that_come_byte_by_byte_hold_up_no_others() {
    crate::require!(fuse, root);
    let stub = Stub::start();
    let mount = mount(&stub, &["--rebuild-from", "none", "--pack", "0"]);
    let files: Vec<_> = (0..=DRIPPING)
        .map(|number| {
            let (path, bytes) = (mount.files(format!("f{number}")), fill(number, 1 << 20));
            write_and_close(&path, &bytes).unwrap();
            (path, bytes)
        })
        .collect();
    within(SETTLED_WITHIN, "everything to be there", || {
        (mount.status("remote_waiting_files") == "0").then_some(())
    });
    for (path, _) in &files {
        setxattr(path, "user.kvfs.tier", b"remote").unwrap();
    }
    within(SETTLED_WITHIN, "the files to leave", || {
        files.iter().all(|(path, _)| tier(path) == "remote").then_some(())
    });
    let (last, others) = files.split_last().unwrap();
    let hash = blake3::hash(&last.1).to_string();
    stub.answer(move |request| {
        let drips = request.gets("/blobs/") && !request.gets(&hash);
        Answer::Drip(Duration::from_secs(1)).when(drips)
    });
    std::thread::scope(|scope| {
        for (path, _) in others {
            scope.spawn(move || {
                let start = Instant::now();
                let error = std::fs::read(path).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT), "{error}");
                assert!(start.elapsed() < HELD_MAX, "{:?}", start.elapsed());
            });
        }
        std::thread::sleep(Duration::from_secs(2));
        let start = Instant::now();
        assert!(std::fs::read(&last.0).unwrap() == last.1);
        assert!(start.elapsed() < HELD_MAX, "{:?}", start.elapsed());
    });
    // Nothing hangs, and what is slow is told.
    let slow = mount.metric("kvfs_remote_requests_total{op=\"get\",result=\"slow\"}");
    assert!(slow >= DRIPPING, "{slow} of {DRIPPING}");
    let told = "which is slower than 16 KiB/s";
    assert!(mount.log().contains(told), "{}", mount.log());
    // Each of eight on a slow link is not too slow.
    stub.answer(|request| Answer::Slowly(LINK_SHARE).when(request.gets("/blobs/")));
    std::thread::scope(|scope| {
        for (path, bytes) in &others[..8] {
            scope.spawn(move || {
                let start = Instant::now();
                assert!(std::fs::read(path).unwrap() == *bytes);
                assert!(start.elapsed() > Duration::from_secs(18), "{:?}", start.elapsed());
            });
        }
    });
    stub.is_honest_again();
    for (path, bytes) in &files {
        assert!(std::fs::read(path).unwrap() == *bytes);
    }
    assert_eq!(mount.try_status("remote_slow"), None);
}

/// Waits until the remote has the file; what it was asked to store, by result.
fn uploads(stub: &Stub, mount: &Mount) -> (u64, u64) {
    within(SETTLED_WITHIN, "the file's bytes", || (!stub.keys("/blobs/").is_empty()).then_some(()));
    within(SETTLED_WITHIN, "everything to be there", || {
        (mount.status("remote_waiting_files") == "0").then_some(())
    });
    let puts = |result: &str| {
        let series = format!("kvfs_remote_requests_total{{op=\"put\",result=\"{result}\"}}");
        mount.metric(&series)
    };
    (puts("ok"), puts("unreachable"))
}

#[test]
fn files_that_go_out_slowly_arrive() {
    crate::require!(fuse, root);
    let stub = Stub::start();
    let mount = mount(&stub, &["--rebuild-from", "none", "--pack", "0"]);
    // What 2 MiB take on a link of 100 KiB/s.
    let link = Duration::from_secs(20);
    stub.answer(move |request| Answer::After(link).when(request.puts("/blobs/")));
    write_and_close(mount.files("f"), &fill(1, 2 << 20)).unwrap();
    let start = Instant::now();
    let (stored, failed) = uploads(&stub, &mount);
    assert!(start.elapsed() > link, "{:?}", start.elapsed());
    assert!((stored > 0, failed) == (true, 0), "{stored} {failed}: {}", mount.log());
}

#[test]
fn a_connection_that_is_reset_is_no_failed_upload() {
    crate::require!(fuse, root);
    let stub = Stub::start();
    let mount = mount(&stub, &["--rebuild-from", "none", "--pack", "0"]);
    let seen = AtomicU64::new(0);
    stub.answer(move |request| {
        let is_first = request.puts("/blobs/") && seen.fetch_add(1, Ordering::Relaxed) == 0;
        Answer::Reset.when(is_first)
    });
    write_and_close(mount.files("f"), &fill(1, 4 << 20)).unwrap();
    let (stored, failed) = uploads(&stub, &mount);
    assert!((stored > 0, failed) == (true, 0), "{stored} {failed}: {}", mount.log());
}

#[test]
fn a_remote_that_never_ends_its_list_of_stores_is_left() {
    crate::require!(fuse, root);
    let stub = Stub::start();
    publish(&stub);
    stub.answer(|request| Answer::Endless.when(request.lists("names")));
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["remote", "ls", REMOTE]).envs(stub.environment());
    let line = complaint(&forks::output(&mut command));
    assert!(line.contains("has more than 262144 names: see what answers there"), "{line}");
}
