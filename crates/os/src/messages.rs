//! Messages between two processes that carry descriptors (unix(7)): each comes whole, or not at all.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
    sendmsg, socketpair,
};

/// Descriptors of a message at most.
pub const DESCRIPTORS_MAX: usize = 16;

/// A message, as it came.
#[derive(Debug)]
pub struct Message {
    /// Its only byte.
    pub kind: u8,
    /// What came along.
    pub descriptors: Vec<OwnedFd>,
}

/// Both ends of a connection. No other program gets them along.
///
/// # Errors
/// There are too many descriptors.
pub fn connection() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SockFlag::SOCK_CLOEXEC;
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?)
}

/// Sends a message.
///
/// # Errors
/// Nobody is at the other end, and those of sendmsg(2).
pub fn send(to: &OwnedFd, kind: u8, descriptors: &[&dyn AsRawFd]) -> io::Result<()> {
    let numbers: Vec<RawFd> = descriptors.iter().map(|one| one.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let rights: &[_] = if numbers.is_empty() { &[] } else { &rights };
    let bytes = [kind];
    // Nobody at the other end is an error, and no signal.
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(to.as_raw_fd(), &[IoSlice::new(&bytes)], rights, flags, None)?;
    Ok(())
}

/// Waits for a message; `None` if the other end is closed.
///
/// # Errors
/// More descriptors came than there may be, and those of recvmsg(2).
pub fn receive(from: &OwnedFd) -> io::Result<Option<Message>> {
    let mut byte = [0];
    let mut room = cmsg_space!([RawFd; DESCRIPTORS_MAX]);
    let (mut bytes, flags) = ([IoSliceMut::new(&mut byte)], MsgFlags::MSG_CMSG_CLOEXEC);
    let received = recvmsg::<()>(from.as_raw_fd(), &mut bytes, Some(&mut room), flags);
    let received = match received {
        Ok(received) if received.bytes == 0 => return Ok(None),
        Err(Errno::ECONNRESET) => return Ok(None),
        outcome => outcome?,
    };
    let mut descriptors = Vec::new();
    for message in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = message {
            // SAFETY: the kernel has made these descriptors for this message, and nobody else has them.
            let owned = numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) });
            descriptors.extend(owned);
        }
    }
    Ok(Some(Message { kind: byte[0], descriptors }))
}

/// A copy of a descriptor at this number, which is free, and which the next program of this process has.
///
/// # Errors
/// The number is taken.
pub fn inherited_as(descriptor: impl AsFd, number: RawFd) -> io::Result<OwnedFd> {
    let found = fcntl(descriptor, FcntlArg::F_DUPFD(number))?;
    // SAFETY: the call has made it, and nobody else has it.
    let owned = unsafe { OwnedFd::from_raw_fd(found) };
    if found == number { Ok(owned) } else { Err(io::ErrorKind::AlreadyExists.into()) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn a_message_brings_its_descriptors() {
        let (here, there) = connection().unwrap();
        let (read_end, write_end) = nix::unistd::pipe().unwrap();
        send(&here, b'a', &[&write_end]).unwrap();
        send(&here, b'b', &[]).unwrap();
        drop(write_end);
        let Message { kind, mut descriptors } = receive(&there).unwrap().unwrap();
        assert_eq!((kind, descriptors.len()), (b'a', 1));
        let copy = inherited_as(&descriptors[0], 700).unwrap();
        assert_eq!(copy.as_raw_fd(), 700);
        assert!(inherited_as(&descriptors[0], 700).is_err(), "it is taken");
        drop(copy);
        File::from(descriptors.remove(0)).write_all(b"through it").unwrap();
        let mut text = String::new();
        File::from(read_end).read_to_string(&mut text).unwrap();
        assert_eq!(text, "through it");
        let last = receive(&there).unwrap().unwrap();
        assert_eq!((last.kind, last.descriptors.len()), (b'b', 0));
        drop(here);
        assert!(receive(&there).unwrap().is_none());
        assert!(send(&there, b'c', &[]).is_err());
    }
}
