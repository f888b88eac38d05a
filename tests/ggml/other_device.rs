//! Weights on another device: a server of the engine's own RPC backend, on loopback, in its place.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use crate::common::mount::scratch_directory;
use crate::common::require::llama_directory;
use crate::common::{Mode, Mount, eventually};
use crate::engine::{command, compile, ran};
use crate::gguf::Model;

/// A server, which is killed when this is dropped.
struct Server {
    process: Child,
    address: String,
    _directory: tempfile::TempDir,
}

impl Server {
    fn start() -> Self {
        let directory = scratch_directory();
        let llama = llama_directory();
        let program = compile("tests/ggml/rpc_server.c", &llama, directory.path());
        // Free a moment ago, and the system gives others first.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let mut server = Command::new(program);
        server.arg(llama.join("lib")).arg(llama.join("rpc/libggml-rpc.so")).arg(&address);
        // The RPC backend looks for its base in the engine's directory.
        server.env("LD_LIBRARY_PATH", llama.join("lib"));
        server.stdout(Stdio::null()).stderr(Stdio::null());
        let process = server.spawn().unwrap();
        eventually("the server to listen", || TcpStream::connect(&address).ok());
        Self { process, address, _directory: directory }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What goes into the parts of a graph that the backend computes, part by part, once attention runs.
fn inputs(log: &str) -> Vec<Vec<&str>> {
    let (_, log) = log.split_once("attention runs here").expect("attention ran");
    let parts = log.lines().filter(|line| line.starts_with("## SPLIT") && line.contains(": KVFS"));
    parts
        .map(|line| line.split('[').skip(1).map(|text| text.split(' ').next().unwrap()).collect())
        .collect()
}

#[test]
fn weights_on_another_device() {
    require!(fuse, llama, rpc, cc);
    let directory = scratch_directory();
    let path = directory.path().join("tiny.gguf");
    Model::write_tiny(&path);
    // Threads that look for work would take the processors from the server's.
    let arguments = "--prompt-tokens 100 --predict 8 --threads 1";
    let stock = ran(&path, arguments, None);
    let server = Server::start();
    let mount = Mount::new(Mode::Served);
    let library = llama_directory().join("rpc/libggml-rpc.so");
    let rest = format!("--flash on --rpc {} --server {}", library.display(), server.address);
    let mut engine = command(&path, &format!("{arguments} {rest}"), Some(mount.path()));
    engine.env("LD_LIBRARY_PATH", llama_directory().join("lib")).env("GGML_SCHED_DEBUG", "2");
    let output = engine.output().unwrap();
    let (text, log) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{log}");
    let all = |name: &str| {
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        let values = lines.filter(|(key, _)| *key == name).map(|(_, value)| value);
        values.map(|value| value.parse().unwrap()).collect::<Vec<u32>>()
    };
    assert_eq!(all("token"), stock.tokens);
    assert_eq!(all("attention"), [4 * 9]);
    // Of each layer q, k and v come, and what was attended to goes: nothing else is computed here.
    let inputs = inputs(&log);
    assert!(inputs.len().is_multiple_of(4) && inputs.len() >= 4, "{inputs:?}");
    for part in &inputs {
        let mut names: Vec<_> = part.iter().map(|name| name.split('-').next().unwrap()).collect();
        names.sort_unstable();
        assert_eq!(names, ["Kcur", "Qcur", "Vcur"]);
    }
}
