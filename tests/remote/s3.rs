//! A real S3 server on loopback, started and ended by the test.

use std::time::{Duration, Instant};

use kvfs::tier::remote::counters::{Counters, Direction, Operation};
use kvfs::tier::remote::{
    BlobStore, Limits, Options, PutMode, Remote, RemoteError, RemoteSpec, Source, State,
};

use crate::common::eventually;
use crate::common::s3_server::{SECRET, Server};
use crate::place::{Place, WHOLE, bytes, get, named, put, refusal};

const PATIENCE: Duration = Duration::from_secs(60);

fn spec(text: &str) -> RemoteSpec {
    text.parse().unwrap()
}

fn place() -> Place {
    let server = Server::start();
    let connector = spec("s3://bucket/some/prefix").connector(server.environment(SECRET));
    let store = connector.connect(&Counters::default()).unwrap();
    Place::new(store, server.files(), Box::new(server))
}

fn remote(server: &Server, place: &str, secret: &str) -> Remote {
    let connector = spec(place).connector(server.environment(secret));
    // The client repeats requests for 15 s, which must not look like silence.
    let limits = Limits { quiet_max: Duration::from_secs(20), ..Limits::default() };
    Remote::with_connector(connector, Options { limits, ..Options::default() }).unwrap()
}

#[test]
fn behaves_as_every_remote() {
    crate::require!(s3);
    crate::suite::run(place);
}

#[test]
fn wrong_credentials_and_a_missing_bucket_are_said_at_the_start() {
    crate::require!(s3);
    let server = Server::start();
    let denied = refusal(&remote(&server, "s3://bucket/some/prefix", "wrong"));
    assert!(matches!(denied, RemoteError::Denied(_)), "{denied}");
    assert!(denied.to_string().contains("AWS_* credentials"), "{denied}");
    let missing = refusal(&remote(&server, "s3://nowhere", SECRET));
    assert!(matches!(missing, RemoteError::Other(_)), "{missing}");
    assert!(missing.to_string().contains("no such bucket"), "{missing}");
}

#[test]
fn a_prefix_with_other_files_is_left_alone() {
    crate::require!(s3);
    let server = Server::start();
    std::fs::create_dir_all(server.files()).unwrap();
    std::fs::write(server.files().join("thesis.tex"), "words").unwrap();
    let foreign = refusal(&remote(&server, "s3://bucket/some/prefix", SECRET));
    assert!(matches!(foreign, RemoteError::Foreign(_)), "{foreign}");
}

#[test]
fn a_server_that_is_killed_and_restarted_is_used_again() {
    crate::require!(s3);
    let mut server = Server::start();
    let remote = remote(&server, "s3://bucket/some/prefix", SECRET);
    assert!(matches!(remote.wait_for_answer(PATIENCE), State::Up { .. }));
    let content = bytes(1, 100_000);
    let name = put(&remote, &content);
    server.stop();
    let mut failures = 0;
    while matches!(remote.state(), State::Up { .. }) {
        let error = get(&remote, name, WHOLE).unwrap_err();
        assert!(matches!(error, RemoteError::Unreachable(_)), "{error}");
        failures += 1;
        assert!(failures <= 3, "the breaker opens");
    }
    assert!(remote.counters().retries() > 0, "requests were repeated before giving up");
    let start = Instant::now();
    assert!(get(&remote, name, WHOLE).is_err());
    assert!(start.elapsed() < Duration::from_secs(1), "an open breaker answers at once");
    server.restart();
    let patience = Instant::now() + PATIENCE;
    while !matches!(remote.state(), State::Up { .. }) {
        assert!(Instant::now() < patience, "{:?}", remote.state());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(get(&remote, name, WHOLE).unwrap() == content);
    let counters = remote.counters();
    assert_eq!(counters.requests(Operation::Put, "ok"), 1);
    assert!(counters.requests(Operation::Get, "unreachable") > 1);
    assert_eq!(counters.requests(Operation::Get, "ok"), 1);
    assert_eq!((counters.bytes(Direction::Out), counters.bytes(Direction::In)), (100_000, 100_000));
}

#[test]
fn a_server_that_is_killed_in_the_middle_of_parts_leaves_nothing_visible() {
    crate::require!(s3);
    let mut server = Server::start();
    let remote = remote(&server, "s3://bucket/some/prefix", SECRET);
    assert!(matches!(remote.wait_for_answer(PATIENCE), State::Up { .. }));
    let content = bytes(2, 48 << 20);
    let name = named(&content);
    let outcome = std::thread::scope(|scope| {
        let source = Source::of(content.clone());
        let putting = scope.spawn(|| remote.put(name, source, PutMode::IfAbsent));
        eventually("parts are sent", || {
            (remote.counters().bytes(Direction::Out) > 16 << 20).then_some(())
        });
        server.stop();
        putting.join().unwrap()
    });
    assert!(outcome.as_ref().is_err_and(RemoteError::is_outage), "{outcome:?}");
    server.restart();
    eventually("the remote is up", || matches!(remote.state(), State::Up { .. }).then_some(()));
    assert_eq!(remote.head(name).unwrap(), None);
    put(&remote, &content);
    assert!(get(&remote, name, WHOLE).unwrap() == content);
}
