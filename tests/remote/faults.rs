//! A directory behind a layer that fails, stalls or hangs at a chosen operation.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant, SystemTime};

use kvfs::tier::remote::counters::Counters;
use kvfs::tier::remote::directory::Directory;
use kvfs::tier::remote::gc::collect;
use kvfs::tier::remote::hold::{Grace, Holder};
use kvfs::tier::remote::names::{Publisher, Row, read_latest};
use kvfs::tier::remote::{
    BlobStore, Connector, Extent, Limits, Listing, Options, Put, PutMode, Remote, RemoteError,
    RemoteName, RemotePrefix, Result, Sink, Source, Stat, State, StoreId,
};

use crate::common::eventually;
use crate::place::{Place, WHOLE, bytes, get, named, put};

/// Far above what a directory in memory needs, also on a busy machine.
const QUIET_MAX: Duration = Duration::from_millis(600);

/// What an operation does instead.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Errno(i32),
    Hang,
}

/// Which operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Never,
    /// The so many-th from now on.
    Once(usize),
    /// That and all after it.
    From(usize),
}

#[derive(Debug)]
struct Plan {
    state: Mutex<(Fault, When, usize)>,
    changed: Condvar,
}

impl Plan {
    fn set(&self, fault: Fault, when: When) {
        *self.state.lock().unwrap() = (fault, when, 0);
        self.changed.notify_all();
    }

    fn heal(&self) {
        self.set(Fault::Errno(0), When::Never);
    }

    fn operations(&self) -> usize {
        self.state.lock().unwrap().2
    }

    fn meet(&self, what: &str) -> Result<()> {
        let mut state = self.state.lock().unwrap();
        state.2 += 1;
        let number = state.2;
        let hits = |when| match when {
            When::Never => false,
            When::Once(index) => number == index,
            When::From(index) => number >= index,
        };
        match *state {
            (_, when, _) if !hits(when) => Ok(()),
            (Fault::Errno(code), ..) => {
                let error = std::io::Error::from_raw_os_error(code);
                Err(RemoteError::from_errno(what, "/faulty", &error))
            }
            (Fault::Hang, ..) => {
                drop(self.changed.wait_while(state, |state| hits(state.1)));
                Ok(())
            }
        }
    }
}

#[derive(Debug)]
struct Faulty(Arc<dyn BlobStore>, Arc<Plan>);

impl BlobStore for Faulty {
    fn place(&self) -> &str {
        self.0.place()
    }
    fn put(&self, name: RemoteName, source: Source, mode: PutMode) -> Result<Put> {
        self.1.meet("put")?;
        self.0.put(name, source, mode)
    }
    fn get(&self, name: RemoteName, extent: Extent, sink: Sink) -> Result<u64> {
        self.1.meet("get")?;
        self.0.get(name, extent, sink)
    }
    fn head(&self, name: RemoteName) -> Result<Option<Stat>> {
        self.1.meet("head")?;
        self.0.head(name)
    }
    fn refresh(&self, name: RemoteName) -> Result<()> {
        self.1.meet("refresh")?;
        self.0.refresh(name)
    }
    fn delete(&self, name: RemoteName) -> Result<()> {
        self.1.meet("delete")?;
        self.0.delete(name)
    }
    fn delete_if_older(&self, name: RemoteName, than: SystemTime) -> Result<bool> {
        self.1.meet("delete")?;
        self.0.delete_if_older(name, than)
    }
    fn settling(&self) -> Duration {
        self.0.settling()
    }
    fn list(&self, prefix: RemotePrefix, after: Option<RemoteName>) -> Result<Listing> {
        self.1.meet("list")?;
        self.0.list(prefix, after)
    }
    fn sweep(&self, older_than: SystemTime) -> Result<u64> {
        self.1.meet("sweep")?;
        self.0.sweep(older_than)
    }
    fn is_vacant(&self) -> Result<bool> {
        self.1.meet("list")?;
        self.0.is_vacant()
    }
}

struct FaultyConnector(std::path::PathBuf, Arc<Plan>);

impl Connector for FaultyConnector {
    fn place(&self) -> String {
        "/faulty".to_owned()
    }
    fn connect(&self, _: &Counters) -> Result<Arc<dyn BlobStore>> {
        self.1.meet("open")?;
        Ok(Arc::new(Faulty(Arc::new(Directory::open(&self.0)?), Arc::clone(&self.1))))
    }
}

struct Fixture {
    place: Place,
    plan: Arc<Plan>,
    remote: Arc<Remote>,
}

fn fixture(limits: Limits) -> Fixture {
    let place = Place::quick();
    let state = Mutex::new((Fault::Errno(0), When::Never, 0));
    let plan = Arc::new(Plan { state, changed: Condvar::new() });
    let connector = Arc::new(FaultyConnector(place.files.clone(), Arc::clone(&plan)));
    let options = Options { limits, ..Options::default() };
    let remote = Arc::new(Remote::with_connector(connector, options).unwrap());
    assert!(matches!(remote.wait_for_answer(Duration::from_secs(20)), State::Up { .. }));
    Fixture { place, plan, remote }
}

fn limits() -> Limits {
    Limits { quiet_max: QUIET_MAX, threads_max: 2, stuck_max: 2, total_max: None }
}

fn wait_until_up(remote: &Remote) {
    eventually("the remote is up", || matches!(remote.state(), State::Up { .. }).then_some(()));
}

/// All that a store does to rely on an object: `Ok` means that it may.
fn demote(remote: &Arc<Remote>, content: &[u8]) -> Result<()> {
    let store: Arc<dyn BlobStore> = remote.clone();
    let name = named(content);
    let held = Holder::new(Arc::clone(&store), Grace::default())
        .hold(name, &Source::of(content.to_vec()))?;
    let found = get(store.as_ref(), name, Extent::Whole { bytes: Some(content.len() as u64) })?;
    assert!(found == content);
    let RemoteName::Blob(blob) = name else { unreachable!() };
    let row = Row { key: b"key".to_vec(), value: content[..8].to_vec(), blob: Some(blob) };
    let mut publisher = Publisher::new(store, StoreId(1), Grace::default())?;
    assert!(publisher.publish(1, [Ok(row)].into_iter(), Some(held.since))?.is_reliable);
    Ok(())
}

#[test]
fn whichever_operation_fails_the_outcome_is_whole_or_absent() {
    for (index, errno) in
        [libc::EIO, libc::ESTALE, libc::ENOSPC, libc::EACCES].into_iter().enumerate()
    {
        let mut completed = false;
        for number in 1..40 {
            let fixture = fixture(limits());
            let content = bytes(index as u64 * 100 + number as u64, 10_000);
            fixture.plan.set(Fault::Errno(errno), When::Once(number));
            let outcome = demote(&fixture.remote, &content);
            let was_hit = fixture.plan.operations() >= number;
            fixture.plan.heal();
            wait_until_up(&fixture.remote);
            assert!(was_hit || outcome.is_ok(), "{errno} at {number}: {outcome:?}");
            // Whatever is visible is whole, and trying again succeeds.
            if fixture.place.file(named(&content)).exists() {
                assert!(get(fixture.remote.as_ref(), named(&content), WHOLE).unwrap() == content);
            }
            demote(&fixture.remote, &content).unwrap();
            let names = read_latest(&fixture.place.store, StoreId(1)).unwrap().unwrap();
            assert_eq!(names.rows().count(), 1);
            assert_eq!(
                collect(fixture.place.store.as_ref(), Grace::default(), false).unwrap().deleted,
                0
            );
            if !was_hit {
                completed = true;
                assert!(number > 5, "{number} operations are too few to prove anything");
                break;
            }
        }
        assert!(completed, "every operation was tried");
    }
}

#[test]
fn an_outage_opens_the_breaker_and_its_end_closes_it() {
    let fixture = fixture(limits());
    let name = put(fixture.remote.as_ref(), b"page");
    for errno in [libc::EIO, libc::ESTALE] {
        fixture.plan.set(Fault::Errno(errno), When::From(1));
        let mut failures = 0;
        while matches!(fixture.remote.state(), State::Up { .. }) {
            assert!(get(fixture.remote.as_ref(), name, WHOLE).unwrap_err().is_outage());
            failures += 1;
        }
        assert_eq!(failures, 3);
        let State::Down { error, .. } = fixture.remote.state() else { panic!("it is down") };
        assert!(error.to_string().contains("remote /faulty"), "{error}");
        let asked = fixture.plan.operations();
        let start = Instant::now();
        for _ in 0..1000 {
            assert!(get(fixture.remote.as_ref(), name, WHOLE).unwrap_err().is_outage());
        }
        assert!(start.elapsed() < Duration::from_secs(1), "the breaker answers");
        assert!(fixture.plan.operations() < asked + 10, "and not the remote");
        fixture.plan.heal();
        wait_until_up(&fixture.remote);
        assert_eq!(get(fixture.remote.as_ref(), name, WHOLE).unwrap(), b"page");
    }
}

#[test]
fn a_full_remote_is_no_outage() {
    let fixture = fixture(limits());
    let name = put(fixture.remote.as_ref(), b"page");
    fixture.plan.set(Fault::Errno(libc::ENOSPC), When::From(1));
    for _ in 0..10 {
        let outcome = fixture.remote.put(named(b"x"), Source::of(b"x".to_vec()), PutMode::IfAbsent);
        assert!(matches!(outcome, Err(RemoteError::Full(_))), "{outcome:?}");
    }
    fixture.plan.heal();
    assert!(matches!(fixture.remote.state(), State::Up { .. }));
    assert_eq!(get(fixture.remote.as_ref(), name, WHOLE).unwrap(), b"page");
}

#[test]
fn a_hung_remote_is_left_behind_in_time_and_used_again_when_it_answers() {
    let fixture = fixture(limits());
    let name = put(fixture.remote.as_ref(), b"page");
    fixture.plan.set(Fault::Hang, When::From(1));
    let start = Instant::now();
    let error = get(fixture.remote.as_ref(), name, WHOLE).unwrap_err();
    assert!(matches!(error, RemoteError::Timeout(_)), "{error}");
    assert!(start.elapsed() < QUIET_MAX * 4, "{:?}", start.elapsed());
    let start = Instant::now();
    assert!(get(fixture.remote.as_ref(), name, WHOLE).unwrap_err().is_outage());
    assert!(start.elapsed() < QUIET_MAX / 2, "one call finds out, the others are spared");
    // Attempts to connect hang as well, and still no more threads than allowed.
    std::thread::sleep(QUIET_MAX * 3);
    assert!((1..=4).contains(&fixture.remote.stuck_threads()));
    fixture.plan.heal();
    wait_until_up(&fixture.remote);
    assert_eq!(get(fixture.remote.as_ref(), name, WHOLE).unwrap(), b"page");
    eventually("no thread is stuck", || (fixture.remote.stuck_threads() == 0).then_some(()));
}

#[test]
fn the_mountpoint_of_a_share_that_is_gone_is_not_made_a_remote() {
    let fixture = fixture(limits());
    let name = put(fixture.remote.as_ref(), b"page");
    let mountpoint = &fixture.place.files;
    let share = mountpoint.with_extension("share");
    crate::common::sys::rename(mountpoint, &share).unwrap();
    std::fs::create_dir(mountpoint).unwrap();
    fixture.plan.set(Fault::Errno(libc::ESTALE), When::From(1));
    while matches!(fixture.remote.state(), State::Up { .. }) {
        assert!(get(fixture.remote.as_ref(), name, WHOLE).is_err());
    }
    fixture.plan.heal();
    eventually("the place is looked at", || {
        let State::Down { error, .. } = fixture.remote.state() else { panic!("an empty place") };
        error.to_string().contains("is it mounted?").then_some(())
    });
    assert_eq!(std::fs::read_dir(mountpoint).unwrap().count(), 0);
    std::fs::remove_dir(mountpoint).unwrap();
    crate::common::sys::rename(&share, mountpoint).unwrap();
    wait_until_up(&fixture.remote);
    assert_eq!(get(fixture.remote.as_ref(), name, WHOLE).unwrap(), b"page");
}

#[test]
fn a_hung_remote_can_be_closed() {
    let fixture = fixture(limits());
    fixture.plan.set(Fault::Hang, When::From(1));
    assert!(fixture.remote.head(named(b"page")).is_err());
    let start = Instant::now();
    drop(fixture.remote);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    fixture.plan.heal();
}

#[test]
fn a_slow_transfer_that_moves_is_no_silence() {
    let place = Place::quick();
    let spec = place.files.to_str().unwrap().parse().unwrap();
    let quick = Limits { quiet_max: Duration::from_millis(500), ..Limits::default() };
    let rate = std::num::NonZeroU64::new(1 << 20);
    let options = Options { limits: quick, bandwidth: rate, expected: None, ..Options::default() };
    let remote = Remote::open(&spec, options).unwrap();
    assert!(matches!(remote.wait_for_answer(Duration::from_secs(20)), State::Up { .. }));
    let content = bytes(3, 2 << 20);
    let start = Instant::now();
    let name = put(&remote, &content);
    let took = start.elapsed();
    assert!(took > Duration::from_millis(1800), "2 MiB at 1 MiB/s took {took:?}");
    assert!(get(&remote, name, WHOLE).unwrap() == content);
}
