//! The address that serves metrics: who may connect, what may happen there, and what must not.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount, eventually, forks};
use crate::exported;

in_both_modes!(
    a_port_serves_what_the_view_tells,
    idle_connections_keep_nobody_out,
    hostile_requests_are_answered_or_dropped,
    a_socket_is_the_owners_and_is_replaced_when_dead,
);

const PORT: [&str; 2] = ["--metrics-addr", "127.0.0.1:0"];

fn connect(mount: &Mount) -> TcpStream {
    let stream = TcpStream::connect(mount.status("metrics_address")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(15))).unwrap();
    stream
}

/// The answer to a request, as far as it comes.
fn ask(stream: &mut (impl Read + Write), request: &[u8]) -> String {
    // Who is refused early may not hear the end of the question.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn get(stream: &mut (impl Read + Write)) -> String {
    let answer = ask(stream, b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").expect(&answer);
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    body.to_owned()
}

fn threads(mount: &Mount) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", mount.pid())).unwrap();
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
    tasks.filter_map(|task| name(task.unwrap())).collect()
}

fn a_port_serves_what_the_view_tells(mode: Mode) {
    let mut mount = Mount::with_options(mode, &PORT);
    let told = exported::parse(&get(&mut connect(&mount)));
    let view = exported::of(&mount);
    assert_eq!(told.keys().collect::<Vec<_>>(), view.keys().collect::<Vec<_>>());
    assert_eq!(told["kvfs_mount_ready"].series, view["kvfs_mount_ready"].series);
    // It is told anew.
    fs::write(mount.files("a"), b"a").unwrap();
    eventually("the metrics to change", || {
        let told = exported::parse(&get(&mut connect(&mount)));
        (told["kvfs_objects"].series[0].value > 0.0).then_some(())
    });
    let config = fs::read_to_string(mount.join(".kvfs/config")).unwrap();
    assert!(config.contains("metrics_addr = \"127.0.0.1:0\""), "{config}");
    // A client that stays does not keep the mount.
    let mut idle = connect(&mount);
    let begun = Instant::now();
    assert!(mount.unmount().success());
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!(ask(&mut idle, b""), "");
}

fn idle_connections_keep_nobody_out(mode: Mode) {
    let mount = Mount::with_options(mode, &PORT);
    let before = fs::read_dir(format!("/proc/{}/fd", mount.pid())).unwrap().count();
    // Half of them send nothing, half read nothing.
    let idle: Vec<TcpStream> = (0..1000)
        .map(|number| {
            let mut stream = connect(&mount);
            if number % 2 == 0 {
                let path = ["/metrics", "/", "/page.json"][number / 2 % 3];
                let _ = write!(stream, "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
            }
            stream
        })
        .collect();
    let begun = Instant::now();
    assert!(get(&mut connect(&mount)).contains("kvfs_mount_ready"));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let open = fs::read_dir(format!("/proc/{}/fd", mount.pid())).unwrap().count();
    assert!(open <= before + 40, "{open} descriptors, {before} before");
    let names = threads(&mount);
    let serving = names.iter().filter(|name| name.starts_with("kvfs-metrics")).count();
    assert_eq!(serving, 1, "{names:?}");
    fs::write(mount.files("a"), b"a").unwrap();
    drop(idle);
}

fn hostile_requests_are_answered_or_dropped(mode: Mode) {
    let mount = Mount::with_options(mode, &PORT);
    let check = |request: &[u8], expected: &str| {
        let answer = ask(&mut connect(&mount), request);
        let is_right = answer.starts_with(expected) && answer.is_empty() == expected.is_empty();
        assert!(is_right, "{answer:?} instead of {expected}");
    };
    check(b"GET /metrics?a=b HTTP/1.0\r\n\r\n", "HTTP/1.0 200");
    check(b"HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", "HTTP/1.1 200");
    check(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n", "HTTP/1.1 404");
    check(b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", "HTTP/1.1 404");
    check(
        b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
        "HTTP/1.1 405",
    );
    check(b"\0\xff\r\n\r\n", "HTTP/1.1 400");
    check(b"GET /metrics HTTP/9.9\r\n\r\n", "HTTP/1.1 400");
    check(&b"GET /aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".repeat(10_000), "HTTP/1.1 4");
    let many = [b"GET /metrics HTTP/1.1\r\n".as_slice(), &b"A: b\r\n".repeat(1000)].concat();
    check(&many, "HTTP/1.1 431");
    // What never ends is ended.
    let begun = Instant::now();
    check(b"GET /metrics HTTP/1.1\r\nHost:", "");
    assert!(begun.elapsed() > Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!(mount.status("state"), "ok");
    get(&mut connect(&mount));
}

fn a_socket_is_the_owners_and_is_replaced_when_dead(mode: Mode) {
    let beside = scratch_directory();
    let socket = beside.path().join("metrics.socket");
    let address = format!("unix:{}", socket.display());
    let mut mount = Mount::with_options(mode, &["--metrics-addr", &address]);
    assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o7777, 0o600);
    get(&mut UnixStream::connect(&socket).unwrap());
    // Another mount does not take it away.
    let complaint = refused(beside.path(), &address);
    assert!(complaint.contains("another program or mount listens there"), "{complaint}");
    get(&mut UnixStream::connect(&socket).unwrap());
    mount.crash();
    get(&mut UnixStream::connect(&socket).unwrap());
    assert!(mount.unmount().success());
    assert!(!socket.exists());
    fs::write(&socket, "precious").unwrap();
    let complaint = refused(beside.path(), &address);
    assert!(complaint.contains("is no socket"), "{complaint}");
    assert_eq!(fs::read(&socket).unwrap(), b"precious");
}

/// The line of a mount that is refused; nothing was begun.
fn refused(base: &Path, address: &str) -> String {
    let (store, mountpoint) = (base.join("store"), base.join("mnt"));
    fs::create_dir_all(&mountpoint).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["mount", "--log", base.join("log").to_str().unwrap(), "--metrics-addr", address]);
    let output = forks::output(command.arg(&store).arg(&mountpoint));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(!store.exists(), "a store was made");
    text
}

#[test]
fn what_is_taken_or_out_of_place_is_one_line() {
    require!(fuse);
    let beside = scratch_directory();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let complaint = refused(beside.path(), &address);
    assert!(complaint.contains("another program or mount listens there"), "{complaint}");
    let inside = format!("unix:{}", beside.path().join("mnt/socket").display());
    let complaint = refused(beside.path(), &inside);
    assert!(complaint.contains("outside of the mountpoint"), "{complaint}");
    let missing = format!("unix:{}", beside.path().join("no/socket").display());
    let complaint = refused(beside.path(), &missing);
    assert!(complaint.contains("No such file or directory"), "{complaint}");
}

#[test]
fn an_address_that_others_reach_is_warned_of() {
    require!(fuse);
    let beside = scratch_directory();
    let mountpoint = beside.path().join("mnt");
    fs::create_dir(&mountpoint).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let log = beside.path().join("log");
    command.args(["mount", "--log", log.to_str().unwrap(), "--metrics-addr", "0.0.0.0:0"]);
    let output = forks::output(command.arg(beside.path().join("store")).arg(&mountpoint));
    let mut unmount = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let unmounted = forks::output(unmount.arg("umount").arg(&mountpoint));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && unmounted.status.success(), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("to whoever reaches this machine"), "{text}");
}
