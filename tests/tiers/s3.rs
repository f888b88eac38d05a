//! An object store behind a mount: a real S3 server on loopback.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::s3_server::{SECRET, SETTLED_WITHIN, Server};
use crate::common::sys::{assert_errno, open, setxattr, write_and_close};
use crate::common::tls::TlsServer;
use crate::common::{Mode, Mount, eventually, fill, within};
use crate::faults::files_below;
use crate::place::{BUDGET, BUDGET_BYTES, FILE_BYTES, assert_same, tier};

const OPTIONS: [&str; 8] = [
    "--remote",
    "s3://bucket/some/prefix",
    "--ssd",
    BUDGET,
    "--commit-interval",
    "0.05",
    "--rebuild-from",
    "none",
];

const BETWEEN_UPLOADS: Duration = Duration::from_secs(3);

fn write_files(mount: &Mount) -> Vec<(PathBuf, Vec<u8>)> {
    let write = |number| {
        let (path, bytes) = (mount.files(format!("f{number}")), fill(number, FILE_BYTES));
        write_and_close(&path, &bytes).unwrap();
        (path, bytes)
    };
    (0..8).map(write).collect()
}

fn wait_until_it_fits(mount: &Mount) {
    within(SETTLED_WITHIN, "objects to leave", || {
        let fits = mount.status_number("ssd_used_bytes") <= BUDGET_BYTES;
        (fits && mount.status("remote_waiting_files") == "0").then_some(())
    });
}

/// Asks while all are in the remote and not yet read back there: it was uploaded again, and what came of that took the
/// first one's place when only the remote had it.
fn ask_one_to_leave(path: &Path, server: &Server) {
    let is_object =
        |file: &PathBuf| file.metadata().is_ok_and(|about| about.len() >= FILE_BYTES as u64);
    eventually("everything to be uploaded", || {
        (files_below(&server.files()).iter().filter(|file| is_object(file)).count() >= 8)
            .then_some(())
    });
    std::thread::sleep(BETWEEN_UPLOADS);
    setxattr(path, "user.kvfs.tier", b"remote").unwrap();
    assert_eq!(tier(path), "ssd");
}

#[test]
fn what_does_not_fit_leaves_and_comes_back() {
    crate::require!(fuse, root, s3);
    let mut server = Server::start();
    let mut mount =
        Mount::with_environment(Mode::Passthrough, &OPTIONS, server.environment(SECRET));
    let files = write_files(&mount);
    ask_one_to_leave(&files[0].0, &server);
    wait_until_it_fits(&mount);
    // An upload that began later would be read back by now.
    std::thread::sleep(BETWEEN_UPLOADS * 2);
    let gone: Vec<_> = files.iter().filter(|(path, _)| tier(path) == "remote").collect();
    assert!((3..=6).contains(&gone.len()), "{} of 8 files left", gone.len());
    assert!(gone.iter().any(|(path, _)| *path == files[0].0));
    assert_eq!(mount.status_number("remote_only_objects"), gone.len() as u64);
    server.stop();
    assert_errno(open(&gone[0].0, libc::O_RDONLY), libc::EIO);
    server.restart();
    eventually("the remote", || (mount.status("remote_state") == "up").then_some(()));
    assert_same(&files);
    mount.remount();
    assert_same(&files);
    mount.crash();
    assert_same(&files);
    assert_eq!(mount.status("errors"), "0");
}

#[test]
fn wrong_credentials_are_told_and_files_stay() {
    crate::require!(fuse, root, s3);
    let server = Server::start();
    let environment = server.environment("wrong");
    let mount = Mount::with_environment(Mode::Passthrough, &OPTIONS, environment);
    let files = write_files(&mount);
    eventually("the reason", || {
        let state = mount.status("remote_state");
        (state.starts_with("down: ") && state.contains("s3://bucket/some/prefix")).then_some(())
    });
    assert_same(&files);
    assert_eq!(mount.status("remote_objects"), "0");
    assert!(!mount.log().contains("wrong"), "secrets are not logged");
}

/// As object stores are reached anywhere but on loopback. A server whose certificate nobody knows is not talked to.
#[test]
fn an_object_store_is_reached_over_tls() {
    crate::require!(fuse, root, s3);
    let server = Server::start();
    let in_front = TlsServer::start(server.address);
    let mut environment = server.environment(SECRET);
    environment.retain(|(name, _)| name != "AWS_ALLOW_HTTP" && name != "AWS_ENDPOINT_URL");
    environment.push(("AWS_ENDPOINT_URL".into(), in_front.url()));
    let stranger = Mount::with_environment(Mode::Passthrough, &OPTIONS, environment.clone());
    eventually("the reason", || {
        let state = stranger.status("remote_state");
        (state.starts_with("down: ")
            && state.contains("invalid peer certificate")
            && state.contains("SSL_CERT_FILE"))
        .then_some(())
    });
    drop(stranger);
    environment.push(("SSL_CERT_FILE".into(), in_front.certificate().display().to_string()));
    let mut mount = Mount::with_environment(Mode::Passthrough, &OPTIONS, environment);
    let files = write_files(&mount);
    wait_until_it_fits(&mount);
    assert!(files.iter().any(|(path, _)| tier(path) == "remote"));
    assert_same(&files);
    mount.crash();
    assert_same(&files);
}
