//! A remote that hangs: whatever needs only the disk goes on as if it were not there.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use kvfs::page::batch::{Ask, Status};
use kvfs::sequence::Sequences;

use crate::asking::ask as ask_many;
use crate::common::s3_server::{SECRET, Server};
use crate::common::sys::{assert_errno, open, rename, setxattr, write_and_close};
use crate::common::{Mode, Model, Mount, eventually, fill, within};
use crate::faults::Resumed;
use crate::place::tier;

in_both_modes!(
    positions_that_left_hold_up_nothing,
    opens_that_hang_hold_up_no_question,
    dividing_a_page_that_left_holds_up_no_other,
);

const ROWS: u32 = 10;
/// Opens that hang at a time: more than there are threads for them.
const OPENS: u64 = 40;
/// What takes at most as long as without a remote, on a machine that does other things besides.
const USUAL_MAX: Duration = Duration::from_millis(100);
/// No single operation takes a noticeable part of the 30 s that the remote has.
const LONGEST_MAX: Duration = Duration::from_secs(1);

/// A request that takes longer has a line in the log.
const LATE: Duration = Duration::from_millis(1200);

/// Two mounts: the second has its remote in the first.
struct Nested {
    mount: Mount,
    model: Model,
    outer: Mount,
}

impl Nested {
    fn new(mode: Mode) -> Nested {
        // Who waits for a stopped daemon with rings cannot be killed.
        let outer = Mount::with_options(Mode::Served, &["--no-io-uring"]);
        let remote = outer.files("remote");
        std::fs::create_dir(&remote).unwrap();
        let remote = remote.to_str().unwrap();
        let options = ["--remote", remote, "--rebuild-from", "none", "--commit-interval", "0.2"];
        let mount = Mount::with_options(mode, &options);
        let model = Model::small();
        model.install(&mount);
        write_sequence(&mount, &model, "local", 1);
        Nested { mount, model, outer }
    }
}

fn tokens(seed: u32) -> Vec<u8> {
    (0..ROWS).flat_map(|token| (seed * 1000 + token).to_le_bytes()).collect()
}

fn add(path: PathBuf, bytes: &[u8]) {
    let mut file = std::fs::File::options().append(true).create(true).open(path).unwrap();
    file.write_all(bytes).unwrap();
}

fn write_sequence(mount: &Mount, model: &Model, name: &str, seed: u32) {
    for layer in 0..2 {
        add(model.tail_path(mount, name, layer, 0), &model.rows(u64::from(seed), ROWS));
    }
    add(model.tokens_path(mount, name), &tokens(seed));
}

fn ask(mount: &Mount, model: &Model, prompt: &[u8]) -> String {
    let question = open(model.directory(mount).join("prefixes/match"), libc::O_RDWR).unwrap();
    question.write_all_at(prompt, 0).unwrap();
    let mut answer = vec![0; 200];
    let count = question.read_at(&mut answer, 0).unwrap();
    String::from_utf8_lossy(&answer[..count]).into_owned()
}

fn wait_until_uploaded(mount: &Mount) {
    eventually("everything to be there", || {
        let is_done = mount.status("remote_waiting_files") == "0"
            && mount.status("uncommitted_changes") == "0";
        is_done.then_some(())
    });
}

/// Has a file leave, which takes some rounds.
fn evict(mount: &Mount, path: &Path) {
    setxattr(path, "user.kvfs.tier", b"remote").unwrap();
    eventually("the file to leave", || (mount.status("remote_only_objects") == "1").then_some(()));
}

/// Does what needs only the disk for a while, and tells what took how long.
fn assert_usual(mount: &Mount, model: &Model, name: &str) {
    let directory = model.directory(mount);
    let absent = directory.join("prefixes/ab").join("ab".repeat(32));
    let begin = Instant::now();
    let mut took = Vec::new();
    let mut number = 0;
    while begin.elapsed() < Duration::from_secs(2) {
        number += 1;
        let mut time = |what: &str, act: &mut dyn FnMut()| {
            let start = Instant::now();
            act();
            took.push((start.elapsed(), what.to_owned()));
        };
        let written = mount.files(format!("{name}{number}"));
        time("write", &mut || write_and_close(&written, b"local").unwrap());
        time("read", &mut || assert_eq!(std::fs::read(&written).unwrap(), b"local"));
        time("absent", &mut || assert!(!mount.files(format!("no{number}")).exists()));
        time("list", &mut || assert!(std::fs::read_dir(mount.files("")).unwrap().count() > 0));
        time("statfs", &mut || assert!(nix::sys::statvfs::statvfs(mount.path()).is_ok()));
        time("prefix", &mut || assert_errno(std::fs::metadata(&absent), libc::ENOENT));
        time("slot", &mut || assert!(std::fs::metadata(directory.join("slots/local.bin")).is_ok()));
        time("slot bytes", &mut || drop(std::fs::read(directory.join("slots/local.bin")).unwrap()));
        time("edited slot", &mut || drop(std::fs::metadata(directory.join("slots/moved.bin"))));
        time("question", &mut || {
            let answer = ask(mount, model, &tokens(1));
            assert!(answer.contains("\"local\""), "{answer}");
        });
        time("wish", &mut || setxattr(&written, "user.kvfs.tier", b"ssd").unwrap());
        std::thread::sleep(Duration::from_millis(2));
    }
    took.sort();
    let usual = &took[took.len() * 99 / 100];
    let longest = took.last().unwrap();
    assert!(usual.0 < USUAL_MAX, "one of a hundred takes longer than {usual:?}; {longest:?}");
    assert!(longest.0 < LONGEST_MAX, "{longest:?}");
    within(Duration::from_secs(3), "what was closed to be durable", || {
        (mount.status("uncommitted_changes") == "0").then_some(())
    });
}

/// They left under another name, as with a kvfs that let them go.
fn positions_that_left_hold_up_nothing(mode: Mode) {
    let Nested { mut mount, model, outer } = Nested::new(mode);
    write_sequence(&mount, &model, "moved", 2);
    let sequence = model.sequence(&mount, "moved");
    let (staged, positions) = (sequence.join(".p.tmp"), sequence.join("positions.json"));
    let json = r#"{"schema_version":1,"edited_at":10,"runs":[[0,10,0,0]],"next":[10,10]}"#;
    write_and_close(&staged, json.as_bytes()).unwrap();
    wait_until_uploaded(&mount);
    evict(&mount, &staged);

    let resumed = Resumed::after_stopping(&outer);
    rename(&staged, &positions).unwrap();
    add(sequence.join("tokens"), &7_u32.to_le_bytes());
    assert_usual(&mount, &model, "first");
    add(sequence.join("tokens"), &8_u32.to_le_bytes());
    assert_usual(&mount, &model, "second");
    write_and_close(mount.files("closed"), b"before the crash").unwrap();
    std::thread::sleep(Duration::from_secs(2));
    mount.kill();
    drop(resumed);
    mount.mount();
    assert_eq!(std::fs::read(mount.files("closed")).unwrap(), b"before the crash");
    eventually("the positions to come back", || (tier(&positions) == "ssd").then_some(()));
    eventually("the sequence to be found", || {
        ask(&mount, &model, &tokens(2)).contains("\"moved\"").then_some(())
    });
    // Never again.
    assert_errno(setxattr(&positions, "user.kvfs.tier", b"remote"), libc::EOPNOTSUPP);
    drop(mount);
}

fn opens_that_hang_hold_up_no_question(mode: Mode) {
    let Nested { mut mount, model, outer } = Nested::new(mode);
    let files: Vec<PathBuf> = (0..OPENS)
        .map(|number| {
            let path = mount.files(format!("f{number}"));
            write_and_close(&path, &fill(number, 100_000)).unwrap();
            path
        })
        .collect();
    wait_until_uploaded(&mount);
    for path in &files {
        setxattr(path, "user.kvfs.tier", b"remote").unwrap();
    }
    eventually("the files to leave", || {
        (mount.status_number("remote_only_objects") == OPENS).then_some(())
    });
    let resumed = Resumed::after_stopping(&outer);
    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for path in &files {
            let ended = &ended;
            scope.spawn(move || {
                // How they end does not matter.
                drop(open(path, libc::O_RDONLY));
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }
        std::thread::sleep(Duration::from_millis(500));
        assert_batch_knows(&mount);
        assert_usual(&mount, &model, "meanwhile");
        let ended = ended.load(Ordering::Relaxed);
        assert!(ended < files.len() / 2, "{ended} opens did not wait");
        drop(resumed);
    });
    assert!(mount.unmount().success());
    drop(outer);
}

/// Operations on the sequences of a model take turns; nobody has the turn who waits for a remote.
fn dividing_a_page_that_left_holds_up_no_other(mode: Mode) {
    let Nested { mut mount, model, outer } = Nested::new(mode);
    let pages = [0, 1].map(|layer| {
        let path = model.page_path(&mount, "away", layer, 0);
        write_and_close(&path, &model.page(layer, 0, 2)).unwrap();
        path
    });
    wait_until_uploaded(&mount);
    for path in &pages {
        setxattr(path, "user.kvfs.tier", b"remote").unwrap();
    }
    eventually("the pages to leave", || (mount.status("remote_only_objects") == "2").then_some(()));
    let sequences = Sequences::open(&model.directory(&mount)).unwrap();
    let resumed = Resumed::after_stopping(&outer);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| sequences.seq_cp("away", "copy", ..10));
        std::thread::sleep(LATE);
        assert!(!waiting.is_finished(), "the copy did not wait for the remote");
        let begin = Instant::now();
        sequences.seq_cp("local", "other", ..).unwrap();
        sequences.clear("other").unwrap();
        assert!(begin.elapsed() < LONGEST_MAX, "{:?}", begin.elapsed());
        drop(resumed);
        waiting.join().unwrap().unwrap();
    });
    let [whole, rows] = [32, 10].map(|count| model.rows(2, count));
    let (_, count) = sequences.positions("copy").unwrap();
    assert_eq!(count, 10);
    let tail = std::fs::read(model.tail_path(&mount, "copy", 1, 0)).unwrap();
    assert!(tail == rows && whole.starts_with(&tail), "{} bytes", tail.len());
    // Who looks for the reason finds it.
    let told = "open of models/small/sequences/away/000/0000000.safetensors took ";
    let log = mount.log();
    let line = log.lines().find(|line| line.contains(told)).unwrap_or_else(|| panic!("{log}"));
    assert!(line.ends_with(", among those that wait for the remote"), "{line}");
    assert!(mount.unmount().success());
    drop(outer);
}

/// What a question about many names tells of files that only the remote has is known here.
fn assert_batch_knows(mount: &Mount) {
    let names: Vec<Vec<u8>> = (0..OPENS).map(|number| format!("f{number}").into()).collect();
    let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
    let begin = Instant::now();
    for (kind, expected) in
        [(Ask::Have, (Status::Here, 100_000)), (Ask::Get, (Status::Away, 100_000))]
    {
        let told = ask_many(mount.path(), kind, "files", &names).unwrap();
        assert!(told.iter().all(|(status, size, _)| (*status, *size) == expected), "{told:?}");
    }
    assert!(begin.elapsed() < LONGEST_MAX, "{:?}", begin.elapsed());
}

/// Requests of one kind are held until another kind is chosen.
#[derive(Default)]
struct Gate {
    held: Mutex<Option<&'static str>>,
    changed: Condvar,
    met: Mutex<u64>,
}

impl Gate {
    fn hold(&self, kind: Option<&'static str>) {
        *self.held.lock().unwrap() = kind;
        *self.met.lock().unwrap() = 0;
        self.changed.notify_all();
    }

    fn pass(&self, kind: &str) {
        let mut held = self.held.lock().unwrap();
        if *held == Some(kind) {
            *self.met.lock().unwrap() += 1;
        }
        while *held == Some(kind) {
            held = self.changed.wait(held).unwrap();
        }
    }
}

/// What an HTTP request asks of an object store.
fn kind(head: &str) -> &'static str {
    let mut words = head.split(' ');
    let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    match method {
        "PUT" => "PUT",
        "HEAD" => "HEAD",
        "DELETE" | "POST" => "DELETE",
        _ if target.contains("list-type") => "LIST",
        _ => "GET",
    }
}

/// Runs something beside the test, until the process ends.
fn start(name: &str, run: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().name(name.to_owned()).spawn(run).unwrap();
}

/// Passes connections on, one request each.
fn proxy(to: SocketAddr, gate: &Arc<Gate>) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let gate = Arc::clone(gate);
    start("proxy", move || {
        for client in listener.incoming().flatten() {
            let gate = Arc::clone(&gate);
            // A client that gives up ends its connection, and with it this thread.
            start("connection", move || drop(pass_on(client, to, &gate)));
        }
    });
    address
}

fn pass_on(mut client: TcpStream, to: SocketAddr, gate: &Gate) -> std::io::Result<()> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&head).into_owned();
    gate.pass(kind(&text));
    let length = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    let mut server = TcpStream::connect(to)?;
    let head = text.trim_end().to_owned() + "\r\nConnection: close\r\n\r\n";
    server.write_all(head.as_bytes())?;
    std::io::copy(&mut client.try_clone()?.take(length.unwrap_or(0)), &mut server)?;
    std::io::copy(&mut server, &mut client)?;
    Ok(())
}

#[test]
fn each_kind_of_request_of_an_object_store_hangs_in_turn() {
    crate::require!(fuse, root, s3);
    let (server, gate) = (Server::start(), Arc::new(Gate::default()));
    let address = proxy(server.address, &gate);
    let mut environment = server.environment(SECRET);
    for (name, value) in &mut environment {
        if name == "AWS_ENDPOINT_URL" {
            *value = format!("http://{address}");
        }
    }
    let options = ["--remote", "s3://bucket/some/prefix", "--rebuild-from", "none"];
    let often = ["--remote-index", "0.1", "--commit-interval", "0.2"];
    let options = [&options[..], &often].concat();
    let mut mount = Mount::with_environment(Mode::Passthrough, &options, environment);
    let model = Model::small();
    model.install(&mount);
    write_sequence(&mount, &model, "local", 1);
    eventually("the remote", || (mount.status("remote_state") == "up").then_some(()));
    for kind in ["PUT", "HEAD", "LIST", "GET", "DELETE"] {
        gate.hold(Some(kind));
        assert_usual(&mount, &model, &kind.to_lowercase());
        // Nothing is deleted, or read back, in so short a time; the others are met.
        let met = *gate.met.lock().unwrap();
        assert!(met > 0 || ["GET", "DELETE"].contains(&kind), "{kind} was not asked for");
        gate.hold(None);
        eventually("the remote", || (mount.status("remote_state") == "up").then_some(()));
    }
    gate.hold(Some("PUT"));
    write_and_close(mount.files("last"), b"last").unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let start = Instant::now();
    assert!(mount.unmount().success());
    let ended = start.elapsed();
    assert!(ended < Duration::from_secs(10), "the unmount took {ended:?}");
    gate.hold(None);
}
