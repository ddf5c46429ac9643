//! `kvpool cert`: a private CA for a quick start. Who has a CA of their own needs only the names (`kvpool-net`, `names`).

use std::fs::{DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use kvpool_net::{Role, names_for};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

use crate::exit::{failure, usage};

/// The CA's subject. Constant, so that a key alone is enough to sign as this CA again.
const CA_NAME: &str = "kvpool private CA";
/// How long a CA is good for.
const CA_DAYS: u32 = 3_650;
/// Certificates begin this long before they are made, for clocks that differ.
const BACKDATE: Duration = Duration::from_secs(3_600);
/// Longest key file that is read, in bytes.
const MAX_KEY_BYTES: u64 = 64 << 10;

const EXAMPLES: &str = "\
Examples:
  kvpool cert ca                          a CA in ./kvpool-certs: ca.pem for everybody, ca.key to be kept safe
  kvpool cert issue member 1              for coordinator 1
  kvpool cert issue shard '*'             one certificate that all shards share
  kvpool cert issue person ada            for somebody at the command line

Then start each process with --tls-ca, --tls-cert and --tls-key (or KVPOOL_TLS_CA, ..._CERT, ..._KEY). A member lets only members,
shards, proxies, agents and persons of its CA in; a shard only under its own name; changes are for persons.";

/// Make a private CA and certificates for mutual TLS.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CertArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Make a CA
    #[command(after_help = EXAMPLES)]
    Ca {
        /// Directory for the files; made if it is not there, readable by its owner only
        #[arg(long, value_name = "DIR", default_value = "kvpool-certs")]
        dir: PathBuf,
    },
    /// Make a certificate and its key, signed by the CA in the directory
    #[command(after_help = EXAMPLES)]
    Issue {
        /// member, shard, proxy, agent or person
        role: Role,
        /// Number of the member, id of the shard, ...; `*` for one that all of the role share
        name: String,
        /// Directory with the CA; the files go there too
        #[arg(long, value_name = "DIR", default_value = "kvpool-certs")]
        dir: PathBuf,
        /// How long it is good for, in days
        #[arg(long, value_name = "DAYS", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
}

/// Makes what was asked for.
pub fn run(args: CertArgs) -> Result<ExitCode> {
    match args.what {
        What::Ca { dir } => make_ca(&dir)?,
        What::Issue { role, name, dir, days } => issue(&dir, role, &name, days)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn make_ca(dir: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|e| failure(format!("failed to make --dir {}: {e}", dir.display())))?;
    let key = KeyPair::generate().context("failed to make a key")?;
    let certificate = ca_params()?.self_signed(&key).context("failed to make the CA")?;
    write_new(&dir.join("ca.key"), &key.serialize_pem(), 0o600)?;
    write_new(&dir.join("ca.pem"), &certificate.pem(), 0o644)?;
    let shown = dir.display();
    println!(
        "made {shown}/ca.pem and {shown}/ca.key; whoever has ca.key can let anybody in: keep it off the machines of the pool"
    );
    println!("next: kvpool cert issue member 1 --dir {shown}");
    Ok(())
}

fn issue(dir: &Path, role: Role, name: &str, days: u32) -> Result<()> {
    let names = names_for(role, name).map_err(|e| usage(e.to_string()))?;
    let (ca_pem, ca_key) = (dir.join("ca.pem"), dir.join("ca.key"));
    if !ca_pem.exists() {
        return Err(failure(format!(
            "there is no CA in {0}: make one with `kvpool cert ca --dir {0}`",
            dir.display()
        )));
    }
    let ca_key = KeyPair::from_pem(&read_key(&ca_key)?)
        .map_err(|e| failure(format!("failed to use {}: {e}", ca_key.display())))?;
    let issuer = Issuer::new(ca_params()?, ca_key);
    let key = KeyPair::generate().context("failed to make a key")?;
    let mut params =
        CertificateParams::new(names).map_err(|e| usage(format!("failed to name the certificate: {e}")))?;
    params
        .distinguished_name
        .push(DnType::CommonName, format!("{} {name}", role.word()));
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Members call each other: every certificate serves on both sides.
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    set_days(&mut params, days)?;
    let certificate = params
        .signed_by(&key, &issuer)
        .context("failed to sign the certificate")?;
    let base = format!("{}-{}", role.word(), if name == "*" { "all" } else { name });
    let (cert_path, key_path) = (dir.join(format!("{base}.pem")), dir.join(format!("{base}.key")));
    write_new(&key_path, &key.serialize_pem(), 0o600)?;
    write_new(&cert_path, &certificate.pem(), 0o644)?;
    println!(
        "--tls-ca {} --tls-cert {} --tls-key {}",
        ca_pem.display(),
        cert_path.display(),
        key_path.display()
    );
    Ok(())
}

fn ca_params() -> Result<CertificateParams> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, CA_NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    set_days(&mut params, CA_DAYS)?;
    Ok(params)
}

fn set_days(params: &mut CertificateParams, days: u32) -> Result<()> {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .context("the clock is before 1970")?;
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_before = epoch + now.saturating_sub(BACKDATE);
    params.not_after = epoch + now + Duration::from_secs(u64::from(days) * 86_400);
    Ok(())
}

fn read_key(path: &Path) -> Result<String> {
    let wrong = |e: String| failure(format!("failed to read {}: {e}", path.display()));
    let size = std::fs::metadata(path).map_err(|e| wrong(e.to_string()))?.len();
    if size > MAX_KEY_BYTES {
        return Err(wrong(format!("{size} bytes is no key")));
    }
    std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))
}

/// Never over a file that is there: a key may be the only one.
fn write_new(path: &Path, text: &str, mode: u32) -> Result<()> {
    let shown = path.display();
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => failure(format!("{shown} is there already: move it away first")),
            _ => failure(format!("failed to write {shown}: {e}")),
        })?;
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(|e| failure(format!("failed to write {shown}: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_net::{TlsFiles, Trust};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_is_made_can_be_used_and_is_never_written_over() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("certs");
        assert!(
            issue(&dir, Role::Member, "1", 1)
                .unwrap_err()
                .to_string()
                .contains("kvpool cert ca")
        );
        make_ca(&dir).unwrap();
        issue(&dir, Role::Member, "1", 1).unwrap();
        issue(&dir, Role::Shard, "*", 1).unwrap();
        for base in ["member-1", "shard-all"] {
            let files = TlsFiles {
                ca: dir.join("ca.pem"),
                cert: dir.join(format!("{base}.pem")),
                key: dir.join(format!("{base}.key")),
            };
            Trust::load(&files).unwrap();
            let mode = std::fs::metadata(&files.key).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        let before = std::fs::read(dir.join("ca.key")).unwrap();
        assert!(make_ca(&dir).unwrap_err().to_string().contains("already"));
        assert!(
            issue(&dir, Role::Member, "1", 1)
                .unwrap_err()
                .to_string()
                .contains("already")
        );
        assert_eq!(std::fs::read(dir.join("ca.key")).unwrap(), before);
        assert!(issue(&dir, Role::Member, "a.b", 1).is_err());
    }
}
