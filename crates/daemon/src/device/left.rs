//! Requests that waited while the mount had no daemon, because one had died.
//!
//! The kernel had looked their paths up in the tree that is lost. Where a name led to a file or directory that has it not
//! any more, the request is for another one by now: writing to it would destroy what is durable. So before anything is
//! served, those are answered with ESTALE, upon which the kernel looks the path up anew, and asks again.

use std::collections::BTreeSet;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::{Message, Taker};
use crate::protocol::{Call, Request, Ticket, answer, is_misled};

/// For who has looked a path up and not asked yet.
const ON_ITS_WAY: Duration = Duration::from_millis(20);

impl Taker<'_> {
    /// Takes in all requests that wait, and refuses those that may be misled.
    pub(super) fn take_in_left(&self, buffer: &mut [u8]) {
        std::thread::sleep(ON_ITS_WAY);
        // One that is taken back meanwhile is not to be waited for.
        if let Err(error) = self.take_without_waiting(buffer) {
            log::error!("requests that waited are not looked at: {error}");
        }
        if let Err(error) = fcntl(self.device, FcntlArg::F_SETFL(OFlag::O_RDWR)) {
            log::error!("the device: {error}");
        }
    }

    fn take_without_waiting(&self, buffer: &mut [u8]) -> nix::Result<()> {
        fcntl(self.device, FcntlArg::F_SETFL(OFlag::O_RDWR | OFlag::O_NONBLOCK))?;
        let core = &self.served.operations.fs.core;
        // Threads that were refused. What one of them asks for next it has looked up with this daemon, however soon it comes: the
        // kernel tries a call once more, and no further time.
        let mut refused_threads = BTreeSet::new();
        loop {
            let length = match nix::unistd::read(self.device, &mut *buffer) {
                Ok(length) => length,
                Err(Errno::EINTR | Errno::ENOENT) => continue,
                Err(Errno::EAGAIN | Errno::ENODEV) => return Ok(()),
                Err(error) => return Err(error),
            };
            let message = &buffer[..length];
            let request = Request::of_message(message);
            let misled = request.filter(|request| {
                !refused_threads.contains(&request.header.pid)
                    && is_misled(core, request, |inodes| core.before.was_misled(inodes))
            });
            if let Some(request) = misled {
                // Of those in other namespaces none is known.
                if request.header.pid != 0 {
                    refused_threads.insert(request.header.pid);
                }
                let in_hand = self.gate.take();
                let ticket = Ticket::new(Message::new(request.header.unique, self.device, in_hand));
                let refused = Some(Call::Refuse(fuser::Errno::ESTALE));
                answer(&self.served.operations, &request.header, refused, ticket);
            } else if self.served.line.has_room() {
                self.put(message);
            } else {
                self.serve(message, self.gate.take());
            }
        }
    }
}
