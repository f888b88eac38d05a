//! `kvfs slots watch` and servers that hang, talk nonsense, or end in the middle of something.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread::Builder;
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount, eventually, forks};
use crate::watch::{Watch, files, sequences};

/// Nobody waits for it: it ends with the test's process.
fn in_background(work: impl FnOnce() + Send + 'static) {
    Builder::new().name("server".to_owned()).spawn(work).unwrap();
}

/// Answers requests as long as the test runs, and returns where it listens.
fn serve(answer: impl Fn(&str, &Value, &mut TcpStream) + Clone + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    in_background(move || {
        for stream in listener.incoming() {
            let answer = answer.clone();
            in_background(move || {
                let mut stream = stream.unwrap();
                // A client that has ended in between is none to answer.
                if let Some((path, body)) = request(&stream) {
                    answer(&path, &body, &mut stream);
                }
            });
        }
    });
    address
}

/// The path of a request, and its body.
fn request(stream: &TcpStream) -> Option<(String, Value)> {
    let mut reader = BufReader::new(stream);
    let mut lines = Vec::new();
    while lines.last().is_none_or(|line: &String| !line.trim().is_empty()) {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        lines.push(line.to_lowercase());
    }
    let length = lines.iter().find_map(|line| line.strip_prefix("content-length:"));
    let mut body = vec![0; length.map_or(0, |length| length.trim().parse().unwrap())];
    reader.read_exact(&mut body).ok()?;
    let path = lines[0].split(' ').nth(1)?.to_owned();
    Some((path, serde_json::from_slice(&body).unwrap_or_default()))
}

fn say(stream: &mut TcpStream, text: &str) {
    // It may have hung up.
    let _ = write!(stream, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{text}");
}

/// Longer than any test.
fn hang() {
    std::thread::sleep(Duration::from_secs(600));
}

/// A server that is another program, or none that works: one line, and the watch goes on until it is told to end.
#[test]
fn servers_that_make_no_sense() {
    let place = scratch_directory();
    let watch =
        |address: &str| Watch::start(address, place.path(), Path::new("/nowhere/models/tiny"));
    let hanging = serve(|_, _, _| hang());
    let dripping = serve(|_, _, stream| {
        say(stream, "");
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let endless = serve(|_, _, stream| {
        say(stream, "");
        while stream.write_all(&[b' '; 1 << 12]).is_ok() {}
    });
    let talking = serve(|_, _, stream| say(stream, "Good morning."));
    let other = serve(|_, _, stream| say(stream, "{}"));
    let foreign = serve(|_, _, stream| stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap());
    let odd = serve(|path, _, stream| {
        say(stream, if path == "/slots" { r#"[{"id": "first"}]"# } else { "{}" });
    });
    let cases = [
        (hanging, "no answer in time"),
        (dripping, "time"),
        (endless, "more than"),
        (talking, "no JSON: is this llama-server?"),
        (other, "no list of slots: is this llama-server?"),
        (foreign, "HTTP"),
        (odd, "no list of slots"),
    ];
    let watches = cases.map(|(address, expected)| (watch(&address), address, expected));
    for (watch, address, expected) in watches {
        watch.wait_for_complaint(expected);
        assert!(
            watch.complained().starts_with(&format!("kvfs: {address}/")),
            "{}",
            watch.complained()
        );
        watch.end();
    }
    // While it waits for an answer.
    let watch = watch(&serve(|_, _, _| hang()));
    watch.wait_for("watched", 1);
    let (_, complained) = watch.end();
    assert!(
        complained.contains("ended before the server") || complained.contains("in time"),
        "{complained}"
    );
}

/// A mount with a model, and a directory for slots.
struct Place {
    mount: Mount,
    slots: PathBuf,
}

impl Place {
    fn new() -> Place {
        let mount = Mount::new(Mode::Served);
        let slots = mount.beside("slots");
        std::fs::create_dir(&slots).unwrap();
        let mut create = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        create.arg("create").arg(mount.join("models/tiny"));
        forks::succeed(create.args(["--layers", "4", "--kv-heads", "2", "--head-dim", "64"]));
        Place { mount, slots }
    }

    /// Runs `kvfs slots` once.
    fn slots(&self, what: &str, address: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.args(["slots", what, "--server", address, "--directory"]).arg(&self.slots);
        forks::output(command.arg(self.mount.join("models/tiny")))
    }

    fn watch(&self, address: &str) -> Watch {
        Watch::start(address, &self.slots, &self.mount.join("models/tiny"))
    }

    /// A server with one slot that has a conversation, and writes half of it when it is saved.
    fn half(&self, then: fn()) -> String {
        let slots = self.slots.clone();
        serve(move |path, body, stream| match path {
            "/slots" => {
                say(stream, &json!([{ "id": 0, "id_task": 4, "n_prompt_tokens": 9 }]).to_string());
            }
            path if path.starts_with("/slots/0?action=save") => {
                std::fs::write(slots.join(body["filename"].as_str().unwrap()), b"qsgg").unwrap();
                then();
            }
            _ => say(stream, "{}"),
        })
    }

    /// Waits until the server has begun to write.
    fn written(&self) -> PathBuf {
        eventually("half a file", || files(&self.slots).pop())
    }

    #[track_caller]
    fn assert_nothing_is_left(&self) {
        assert_eq!(files(&self.slots), Vec::<PathBuf>::new());
        assert_eq!(sequences(&self.mount.join("models/tiny")), Vec::<String>::new());
    }
}

#[test]
fn the_server_ends_while_it_saves() {
    require!(fuse);
    let place = Place::new();
    let watch = place.watch(&place.half(|| {}));
    watch.wait_for_complaint("slot 0: http");
    eventually("half a file to go", || files(&place.slots).is_empty().then_some(()));
    watch.end();
    place.assert_nothing_is_left();
}

#[test]
fn the_watch_ends_while_the_server_saves() {
    require!(fuse);
    let place = Place::new();
    let address = place.half(hang);
    let watch = place.watch(&address);
    place.written();
    let (_, complained) = watch.end();
    assert!(complained.contains("may be lost") || complained.contains("in time"), "{complained}");
    place.assert_nothing_is_left();

    // One that is killed leaves what it exchanged; the next one removes it.
    let watch = place.watch(&address);
    let left = place.written();
    watch.kill();
    assert!(left.exists());
    let watch = place.watch(&address);
    eventually("what was left to go", || (!left.exists()).then_some(()));
    watch.end();
    place.assert_nothing_is_left();
}

#[test]
fn a_server_is_watched_once() {
    require!(fuse);
    let place = Place::new();
    let address = serve(|path, _, stream| say(stream, if path == "/slots" { "[]" } else { "{}" }));
    let watch = place.watch(&address);
    watch.wait_for("watched", 1);
    let (status, complained) = place.watch(&address).ended();
    assert_eq!(status.code(), Some(1));
    assert!(complained.contains("is watched by another kvfs slots watch already"), "{complained}");
    let (_, complained) = watch.end();
    assert_eq!(complained, "");
}

/// A daemon that is stopped answers nobody; whoever asks it cannot be ended, so nobody but a child asks.
#[test]
fn the_mount_hangs() {
    require!(fuse);
    let mut place = Place::new();
    place.mount.may_be_slow("its daemon is stopped");
    let daemon = nix::unistd::Pid::from_raw(place.mount.pid().try_into().unwrap());
    let send = |signal| nix::sys::signal::kill(daemon, signal).unwrap();
    send(nix::sys::signal::Signal::SIGSTOP);
    let watch = place.watch(&place.half(|| {}));
    watch.wait_for_complaint("does not answer within 5 seconds");
    watch.end();
    assert_eq!(files(&place.slots), Vec::<PathBuf>::new());
    send(nix::sys::signal::Signal::SIGCONT);
    place.assert_nothing_is_left();
}

#[test]
fn a_restore_of_nothing_says_so() {
    require!(fuse);
    let place = Place::new();
    let unused = serve(|_, _, stream| say(stream, r#"[{"id": 0}]"#));
    let used = serve(|_, _, stream| say(stream, r#"[{"id": 0, "id_task": 4}]"#));
    for (address, why) in [(unused, "has no sequence with tokens"), (used, "every slot is used")] {
        let restored = place.slots("restore", &address);
        let complained = String::from_utf8_lossy(&restored.stderr);
        assert!(restored.status.success() && restored.stdout.is_empty(), "{complained}");
        assert!(complained.starts_with("kvfs: nothing is restored: "), "{complained}");
        assert!(complained.contains(why) && complained.lines().count() == 1, "{complained}");
    }
}

#[test]
fn a_saved_slot_that_is_no_file_is_not_waited_for() {
    require!(fuse);
    let place = Place::new();
    let slots = place.slots.clone();
    let address = serve(move |path, body, stream| match path {
        "/slots" => say(stream, r#"[{"id": 0, "id_task": 4}]"#),
        path if path.contains("action=save") => {
            let name = slots.join(body["filename"].as_str().unwrap());
            nix::unistd::mkfifo(&name, nix::sys::stat::Mode::S_IRWXU).unwrap();
            say(stream, "{}");
        }
        _ => say(stream, "{}"),
    });
    let saved = place.slots("save", &address);
    let complained = String::from_utf8_lossy(&saved.stderr);
    assert_eq!(saved.status.code(), Some(1), "{complained}");
    assert!(complained.contains("is no regular file"), "{complained}");
    place.assert_nothing_is_left();
}
