//! A server that stops, dies and comes back under a mount.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::ganesha::Order;
use crate::common::nfs::Nfs;
use crate::common::random::Random;
use crate::common::sys::{assert_errno, getxattr, open, setxattr, write_and_close};
use crate::common::{Mode, Mount, fill, forks};
use crate::load::Load;
use crate::setting;

/// The deadline of an open is 30 s; a processor that is emulated and busy adds to it.
const DEADLINE: std::ops::Range<u64> = 20..60;
/// A client that lost its server asks again after up to half a minute, kvfs as well.
const BACK_WITHIN: Duration = Duration::from_secs(120);

/// How a server is away.
#[derive(Clone, Copy, Debug)]
enum Outage {
    /// It hangs.
    Hangs(Duration),
    /// It dies, and another takes its place.
    Dies(Duration),
    /// It dies, and comes back once an open of what only the remote has was refused.
    IsMissed,
}

impl Outage {
    fn at_random(random: &mut Random) -> Outage {
        let length = Duration::from_millis(random.below(12_000) as u64);
        match random.below(5) {
            0 | 1 => Outage::Hangs(length),
            2 | 3 => Outage::Dies(length),
            _ => Outage::IsMissed,
        }
    }
}

/// A mount whose remote is a directory on NFS.
struct Place {
    mount: Mount,
    nfs: Nfs,
}

#[test]
fn a_server_that_goes_away_loses_nothing_and_delays_only_who_needs_it() {
    require!(fuse, nfs_server);
    let (further, seed) = (setting("KVFS_NFS_OUTAGES", 0), setting("KVFS_SEED", 1));
    let mut random = Random::of(seed);
    let second = Duration::from_secs(1);
    let mut outages = vec![Outage::Hangs(3 * second), Outage::IsMissed];
    outages.extend((0..further).map(|_| Outage::at_random(&mut random)));
    let nfs = Nfs::mount();
    let remote = nfs.path().join(format!("remote-{seed}"));
    std::fs::create_dir(&remote).unwrap();
    let options = ["--remote", remote.to_str().unwrap(), "--ssd", "16M"];
    let further = ["--commit-interval", "0.05", "--rebuild-from", "none"];
    let mut mount = Mount::with_options(Mode::Served, &[&options[..], &further].concat());
    mount.may_be_slow("its processor may be an emulated one");
    let mut place = Place { mount, nfs };
    let load = Load::new(place.mount.path());
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| load.write(Random::of(seed + 1)));
        scope.spawn(|| load.read(Random::of(seed + 2)));
        scope.spawn(|| load.stay());
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for (number, outage) in outages.iter().enumerate() {
                place.suffer(*outage, &load);
                let elapsed = start.elapsed().as_secs_f64();
                println!("nfs: {elapsed:.1} s, outage {number}, seed {seed}: {outage:?}");
                place.assert_moves_go_on(number);
            }
        }));
        load.end();
        ended.unwrap_or_else(|cause| std::panic::resume_unwind(cause));
    });
    place.mount.crash();
    place.wait_for("the remote", || place.is_up());
    load.compare_all();
    assert!(place.mount.unmount().success(), "{}", place.mount.log());
    let mut fsck = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    forks::succeed(fsck.arg("fsck").arg(place.mount.store()));
    load.report(outages.len());
}

impl Place {
    fn is_up(&self) -> bool {
        self.mount.status("remote_state") == "up"
    }

    #[track_caller]
    fn wait_for(&self, what: &str, mut is_there: impl FnMut() -> bool) {
        let deadline = Instant::now() + BACK_WITHIN;
        while !is_there() {
            let status = || std::fs::read_to_string(self.mount.join(".kvfs/status")).unwrap();
            assert!(Instant::now() < deadline, "waited in vain for {what}:\n{}", status());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The server goes while files are on their way to it, and comes back.
    fn suffer(&mut self, outage: Outage, load: &Load) {
        let written = load.written.load(Ordering::Relaxed);
        self.wait_for("files to move", || {
            let moving = self.mount.status_number("remote_waiting_files") > 0;
            let only = self.mount.status_number("remote_only_objects");
            assert!(!load.is_over());
            moving && only > 5 && load.written.load(Ordering::Relaxed) > written
        });
        load.is_troubled.store(true, Ordering::Release);
        match outage {
            Outage::Hangs(length) => {
                self.nfs.order(Order::Stop);
                std::thread::sleep(length);
                self.nfs.order(Order::Continue);
            }
            Outage::Dies(length) => {
                self.nfs.order(Order::Kill);
                std::thread::sleep(length);
                self.nfs.order(Order::Start);
            }
            Outage::IsMissed => {
                self.nfs.order(Order::Kill);
                self.assert_refused_in_time(load);
                self.nfs.order(Order::Start);
            }
        }
        self.wait_for("the remote to be back", || self.is_up());
        load.is_troubled.store(false, Ordering::Release);
    }

    /// An open of what only the remote has ends with an error, and says why.
    fn assert_refused_in_time(&self, load: &Load) {
        let away: Vec<PathBuf> =
            load.paths().filter(|path| is_remote(path)).map(Path::to_owned).collect();
        let mut waited = Duration::ZERO;
        for path in away {
            let start = Instant::now();
            let opened = open(&path, libc::O_RDONLY);
            waited = start.elapsed();
            // Another reader had it brought back just before, or a writer replaced it.
            if opened.is_ok() {
                continue;
            }
            assert_errno(opened, libc::ETIMEDOUT);
            assert!(waited.as_secs() < DEADLINE.end, "{waited:?}");
            break;
        }
        assert!(waited.as_secs() >= DEADLINE.start, "no open waited for the server: {waited:?}");
        let state = self.mount.status("remote_state");
        assert!(state.starts_with("down: "), "{state}");
        println!("nfs: refused after {:.1} s, {state}", waited.as_secs_f64());
    }

    /// A new file leaves, and comes back whole.
    fn assert_moves_go_on(&self, number: usize) {
        let (path, bytes) =
            (self.mount.files(format!("after{number}")), fill(number as u64, 300_000));
        write_and_close(&path, &bytes).unwrap();
        self.wait_for("a file to leave", || {
            let _ = setxattr(&path, "user.kvfs.tier", b"remote");
            is_remote(&path)
        });
        assert!(std::fs::read(&path).unwrap() == bytes);
        std::fs::remove_file(&path).unwrap();
    }
}

fn is_remote(path: &Path) -> bool {
    getxattr(path, "user.kvfs.tier").is_ok_and(|tier| tier == "remote")
}
