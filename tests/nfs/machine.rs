//! A virtual machine whose kernel has an NFS client. It is emulated: what a machine that is virtual itself
//! offers as KVM may hang. So it takes some ten seconds to boot.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::forks::{spawn, succeed};
use crate::common::ganesha::Ganesha;
use crate::common::mount::scratch_directory;
use crate::guest::{self, Task};
use crate::setting;

/// For the store; it is not written at once.
const DISK_BYTES: u64 = 512 << 20;
/// Booting, the outages of each kind, and the end; on a machine that has more to do.
const TAKES_MAX: Duration = Duration::from_secs(540);
/// A further outage: its length, and what it takes until everything moves again.
const OUTAGE_MAX: Duration = Duration::from_secs(180);
const ENDED: &str = "the program ended with";

#[test]
fn outages_in_a_virtual_machine() {
    require!(root, nfs_machine);
    let mut server = Ganesha::new();
    let control = TcpListener::bind("127.0.0.1:0").unwrap();
    let directory = scratch_directory();
    let task = Task {
        nfs_port: server.port(),
        control_port: control.local_addr().unwrap().port(),
        arguments: "outages:: --nocapture --test-threads=1",
        mark: ENDED,
    };
    let mut machine = Machine::boot(directory.path(), &task);
    control.set_nonblocking(true).unwrap();
    let outages = u32::try_from(setting("KVFS_NFS_OUTAGES", 0)).unwrap();
    let takes_max = TAKES_MAX + OUTAGE_MAX * outages;
    let deadline = Instant::now() + takes_max;
    while !machine.has_ended() {
        assert!(Instant::now() < deadline, "it does not end:\n{}", machine.printed());
        if let Ok((stream, _)) = control.accept() {
            stream.set_nonblocking(false).unwrap();
            stream.set_read_timeout(Some(takes_max)).unwrap();
            pass_on(stream, &mut server);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let printed = machine.printed();
    let is_right = printed.contains(&format!("{ENDED} 0")) && printed.contains("0 lost, 0 torn");
    assert!(is_right, "{printed}");
    printed.lines().filter(|line| line.contains("nfs: ")).for_each(|line| println!("{line}"));
}

/// Obeys whoever is connected until he goes.
fn pass_on(stream: TcpStream, server: &mut Ganesha) {
    let mut answers = stream.try_clone().unwrap();
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { return };
        server.obey(line.parse().unwrap());
        writeln!(answers, "done").unwrap();
    }
}

struct Machine {
    process: Child,
    console: PathBuf,
}

impl Machine {
    fn boot(directory: &Path, task: &Task<'_>) -> Machine {
        let disk = directory.join("disk");
        File::create(&disk).unwrap().set_len(DISK_BYTES).unwrap();
        succeed(Command::new("mkfs.ext4").arg("-q").arg(&disk));
        let console = directory.join("console");
        let log = File::create(&console).unwrap();
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-accel", "tcg", "-cpu", "max", "-m", "640"]);
        command.args(["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]);
        command.args(["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net"]);
        command.args(["-append", "console=ttyS0 quiet panic=-1"]);
        command.arg("-drive").arg(format!("file={},format=raw,if=virtio", disk.display()));
        command.arg("-kernel").arg(guest::kernel());
        command.arg("-initrd").arg(guest::initial_files(directory, task));
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        Machine { process: spawn(&mut command).unwrap(), console }
    }

    fn has_ended(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }

    /// Everything so far.
    fn printed(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.console).unwrap()).into_owned()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
