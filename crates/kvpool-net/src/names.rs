//! The names in certificates: `ROLE.kvpool` and `NAME.ROLE.kvpool`, as DNS names of the subject (RFC 5280 section 4.2.1.6).
//!
//! A certificate that several processes share, as the pods of a StatefulSet do, has `*` for NAME.

use crate::TrustError;
use tonic::Extensions;
use tonic::transport::CertificateDer;
use tonic::transport::server::TlsConnectInfo;
use webpki::EndEntityCert;

/// The last label of every name.
const ROOT: &str = "kvpool";
/// Longest label of a DNS name (RFC 1035 section 2.3.4), in bytes.
const MAX_LABEL: usize = 63;
/// Names of a certificate that are looked at; ours have two.
const MAX_NAMES: usize = 16;

/// What a process or a person may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// A coordinator.
    Member,
    Shard,
    Proxy,
    Agent,
    /// Somebody at the command line.
    Person,
}

impl Role {
    /// Every role.
    pub const ALL: [Role; 5] = [Role::Member, Role::Shard, Role::Proxy, Role::Agent, Role::Person];

    /// The word in certificates, settings and errors.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Role::Member => "member",
            Role::Shard => "shard",
            Role::Proxy => "proxy",
            Role::Agent => "agent",
            Role::Person => "person",
        }
    }

    /// The name that every certificate of the role has: what a client asks for when it connects.
    #[must_use]
    pub fn domain(self) -> String {
        format!("{}.{ROOT}", self.word())
    }
}

impl std::str::FromStr for Role {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let found = Role::ALL.into_iter().find(|role| role.word() == word);
        found.ok_or_else(|| format!("{word:?} is no role; roles are member, shard, proxy, agent, person"))
    }
}

/// The DNS names of a certificate for `name` in `role`.
///
/// # Errors
/// [`TrustError::Name`] when `name` can't stand in a certificate: it must be `*` or 1 to 63 letters, digits, `-` or `_`.
pub fn names_for(role: Role, name: &str) -> Result<Vec<String>, TrustError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let label = !name.is_empty() && name.len() <= MAX_LABEL && name.chars().all(fits);
    let edges = name.starts_with('-') || name.ends_with('-');
    if name != "*" && (!label || edges) {
        return Err(TrustError::Name(name.to_owned()));
    }
    Ok(vec![role.domain(), format!("{name}.{}", role.domain())])
}

/// Who is on the other side of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The listener has no TLS: the join token is all there is.
    Unnamed,
    /// The names that the CA vouched for, as (role, name) pairs; a name may be `*`.
    Named(Vec<(Role, String)>),
}

impl Caller {
    /// Reads the caller from a call's extensions, as the listener left them there.
    #[must_use]
    pub fn of(extensions: &Extensions) -> Caller {
        let Some(info) = extensions.get::<TlsConnectInfo<()>>() else {
            return Caller::Unnamed;
        };
        // The handshake has checked the chain: the first certificate is the caller's own.
        let certificates = info.peer_certs().unwrap_or_default();
        Caller::Named(certificates.first().map(names_in).unwrap_or_default())
    }

    /// May it act in `role`?
    #[must_use]
    pub fn is(&self, role: Role) -> bool {
        match self {
            Caller::Unnamed => true,
            Caller::Named(names) => names.iter().any(|(r, _)| *r == role),
        }
    }

    /// May it act as `name` in `role`?
    #[must_use]
    pub fn is_named(&self, role: Role, name: &str) -> bool {
        match self {
            Caller::Unnamed => true,
            // DNS names have no case.
            Caller::Named(names) => names
                .iter()
                .any(|(r, n)| *r == role && (n == "*" || n.eq_ignore_ascii_case(name))),
        }
    }

    /// For errors and logs.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            Caller::Unnamed => "an unnamed caller".to_owned(),
            Caller::Named(names) if names.is_empty() => "a certificate without a name of kvpool".to_owned(),
            Caller::Named(names) => {
                let words = names.iter().map(|(role, name)| format!("{} {name}", role.word()));
                words.collect::<Vec<_>>().join(", ")
            }
        }
    }
}

/// The names of kvpool in a certificate. A certificate that can't be read has none.
fn names_in(certificate: &CertificateDer<'static>) -> Vec<(Role, String)> {
    let Ok(certificate) = EndEntityCert::try_from(certificate) else {
        return Vec::new();
    };
    certificate
        .valid_dns_names()
        .take(MAX_NAMES)
        .filter_map(parse)
        .collect()
}

/// Reads `NAME.ROLE.kvpool`.
fn parse(name: &str) -> Option<(Role, String)> {
    let mut labels = name.split('.');
    let (name, role, root) = (labels.next()?, labels.next()?, labels.next()?);
    let whole = labels.next().is_none() && root == ROOT;
    whole.then(|| Some((role.parse().ok()?, name.to_owned()))).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for role in Role::ALL {
            for name in ["1", "shard-0", "*", "a_b"] {
                let names = names_for(role, name).unwrap();
                let read: Vec<_> = names.iter().filter_map(|n| parse(n)).collect();
                assert_eq!(read, [(role, name.to_owned())]);
                assert_eq!(names[0], role.domain());
            }
        }
        for other in [
            "kvpool",
            "member.kvpool",
            "a.member.kvpool.org",
            "a.b.member.kvpool",
            "a.boss.kvpool",
            "",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_name_that_is_no_label_is_refused() {
        for name in ["", "a.b", "a b", "-a", "a-", "ü", &"x".repeat(64)] {
            assert!(names_for(Role::Shard, name).is_err(), "{name}");
        }
    }

    #[test]
    fn a_caller_is_what_its_certificate_says() {
        let one = Caller::Named(vec![(Role::Shard, "Shard-1".into())]);
        assert!(one.is(Role::Shard) && !one.is(Role::Member));
        assert!(one.is_named(Role::Shard, "shard-1") && !one.is_named(Role::Shard, "shard-2"));
        let all = Caller::Named(vec![(Role::Shard, "*".into())]);
        assert!(all.is_named(Role::Shard, "shard-2") && !all.is_named(Role::Proxy, "shard-2"));
        assert!(!Caller::Named(Vec::new()).is(Role::Person));
        assert!(Caller::Unnamed.is_named(Role::Member, "1"));
    }
}
