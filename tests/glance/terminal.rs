//! A terminal for programs that draw: a pair of pseudo-terminals, and what somebody would see.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::{eventually, forks};

/// A terminal with a program in it.
pub(crate) struct Terminal {
    keys: File,
    device: File,
    begun_with: libc::termios,
    seen: Arc<Mutex<Vec<u8>>>,
    pub(crate) child: Child,
    columns: usize,
    rows: usize,
}

impl Terminal {
    /// Starts a program.
    pub(crate) fn start(command: &mut Command, columns: u16, rows: u16) -> Terminal {
        let (keys, device) = pair(columns, rows);
        let begun_with = settings(&device);
        let copy = || Stdio::from(device.try_clone().unwrap());
        command.stdin(copy()).stdout(copy()).stderr(copy()).env("TERM", "xterm-256color");
        let child = forks::spawn(command).unwrap();
        let seen = Arc::<Mutex<Vec<u8>>>::default();
        let (mut reader, into) = (keys.try_clone().unwrap(), Arc::clone(&seen));
        let read = move || {
            let mut part = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut part) {
                into.lock().unwrap().extend_from_slice(&part[..count]);
            }
        };
        // Ends with the terminal.
        std::thread::Builder::new().name("terminal".to_owned()).spawn(read).unwrap();
        Terminal {
            keys,
            device,
            begun_with,
            seen,
            child,
            columns: columns.into(),
            rows: rows.into(),
        }
    }

    pub(crate) fn press(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).unwrap();
    }

    /// Everything that came so far.
    pub(crate) fn written(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    /// What is on the screen now.
    pub(crate) fn screen(&self) -> String {
        picture(&self.written(), self.columns, self.rows)
    }

    /// Gives it another size, which the program is told.
    pub(crate) fn resize(&mut self, columns: u16, rows: u16) {
        let size = size(columns, rows);
        // SAFETY: the descriptor is open, and the size outlives the call.
        let outcome =
            unsafe { libc::ioctl(self.keys.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
        assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
        (self.columns, self.rows) = (columns.into(), rows.into());
        self.signal(Signal::SIGWINCH);
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(pid, signal).unwrap();
    }

    #[track_caller]
    pub(crate) fn shows(&self, text: &str) {
        eventually(text, || self.screen().contains(text).then_some(()));
    }

    /// Whether it is as it was before the program.
    pub(crate) fn is_as_before(&self) -> bool {
        let (now, before) = (settings(&self.device), self.begun_with);
        let of = |all: libc::termios| [all.c_iflag, all.c_oflag, all.c_lflag];
        of(now) == of(before)
    }

    /// Waits for the program's end.
    #[track_caller]
    pub(crate) fn end(&mut self) -> std::process::ExitStatus {
        eventually("the program to end", || self.child.try_wait().unwrap())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn size(columns: u16, rows: u16) -> libc::winsize {
    libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

fn pair(columns: u16, rows: u16) -> (File, File) {
    let size = size(columns, rows);
    let (mut keys, mut device) = (-1, -1);
    let nothing = std::ptr::null_mut();
    // SAFETY: both numbers and the size outlive the call; neither a name nor settings are asked for.
    let outcome = unsafe {
        libc::openpty(&raw mut keys, &raw mut device, nothing, nothing.cast(), &raw const size)
    };
    assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
    let own = |number| {
        // SAFETY: the call above has opened it, and nobody else knows it.
        let file = unsafe { File::from_raw_fd(number) };
        // A program must not inherit it beside its own.
        nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))
            .unwrap();
        file
    };
    (own(keys), own(device))
}

fn settings(device: &File) -> libc::termios {
    let mut found = std::mem::MaybeUninit::uninit();
    // SAFETY: the descriptor is open, and there is room for the settings.
    let outcome = unsafe { libc::tcgetattr(device.as_raw_fd(), found.as_mut_ptr()) };
    assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the call has succeeded, so they are there.
    unsafe { found.assume_init() }
}

/// What a terminal makes of the places, characters and erasures that a program sends.
fn picture(written: &str, columns: usize, rows: usize) -> String {
    let mut cells = vec![vec![' '; columns]; rows];
    let (mut x, mut y) = (0, 0);
    let mut characters = written.chars();
    while let Some(character) = characters.next() {
        match character {
            '\u{1b}' => {
                let mut sequence = String::new();
                for part in characters.by_ref() {
                    sequence.push(part);
                    if part.is_ascii_alphabetic() {
                        break;
                    }
                }
                let parameters = sequence.trim_start_matches('[');
                match sequence.chars().last() {
                    Some('H') => {
                        let place = |text: &str| text.parse::<usize>().unwrap_or(1) - 1;
                        let (row, column) = parameters.split_once(';').unwrap_or(("1", "1H"));
                        (x, y) = (place(column.trim_end_matches('H')), place(row));
                    }
                    Some('J') => cells = vec![vec![' '; columns]; rows],
                    _ => {}
                }
            }
            '\r' => x = 0,
            '\n' => y += 1,
            character => {
                if let Some(cell) = cells.get_mut(y).and_then(|row| row.get_mut(x)) {
                    *cell = character;
                }
                x += 1;
            }
        }
    }
    let rows = cells.into_iter().map(|row| row.into_iter().collect::<String>());
    rows.map(|row| row.trim_end().to_owned() + "\n").collect()
}
