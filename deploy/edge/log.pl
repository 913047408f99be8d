#!/usr/bin/perl
# Passes lines from stdin to stdout, and never lets their writers wait. If more
# than a mebibyte of lines waits for the reader of stdout, further lines are
# dropped, as Docker's log mode "non-blocking" does. So are junk lines beyond 20
# a second: strangers cause them without a token. A line says how many were
# dropped. Ends with the writers, within a second. Debian always has Perl.
use strict;
use warnings;
use IO::Handle;
use POSIX qw(strftime);

use constant { MAX_WAITING => 1 << 20, MAX_JUNK => 20, FLUSH_SECONDS => 1 };
# Requests that reached no server, and defects of TLS handshakes.
my $junk = qr/"upstream":""|\[crit\]/;

# Ctrl-C and a lost terminal are for run.sh.
$SIG{$_} = 'IGNORE' for qw(INT TERM HUP PIPE);
# Only cat waits for the reader. O_NONBLOCK on stdout itself would also change
# the stdout of other programs.
my $cat = open(my $out, '|-', 'cat') or die "cat: $!";
$out->blocking(0);

my ($waiting, $part, $dropped) = ('', '', 0);
my ($second, $num_junk) = (0, 0);

sub add {
  my ($line) = @_;
  if (length($waiting) + length($line) > MAX_WAITING
    || $line =~ $junk && ++$num_junk > MAX_JUNK)
  {
    ++$dropped;
  } else {
    $waiting .= $line;
  }
}

sub report {
  $waiting .= sprintf(
    qq({"ts":"%s","level":"warning","msg":"edge: log lines were dropped","lines":%d}\n),
    strftime('%FT%TZ', gmtime), $dropped);
  $dropped = 0;
}

while (1) {
  my ($readable, $writable) = ('', '');
  vec($readable, fileno(STDIN), 1) = 1;
  vec($writable, fileno($out), 1) = $waiting ne '';
  select($readable, $writable, undef, $dropped ? 1 : undef);
  if ($second != time) {
    ($second, $num_junk) = (time, 0);
    report() if $dropped && length($waiting) < MAX_WAITING / 2;
  }
  if (vec($readable, fileno(STDIN), 1)) {
    sysread(STDIN, $part, 1 << 16, length($part)) or last;
    add($1) while $part =~ s/\A(.*\n)//;
  }
  if (vec($writable, fileno($out), 1)) {
    my $count = syswrite($out, $waiting);
    # Nobody will read what cat could not write.
    $count = length($waiting) if !defined $count && !$!{EAGAIN};
    substr($waiting, 0, $count // 0, '');
  }
}

report() if $dropped;
$SIG{ALRM} = sub { kill 'KILL', $cat };
alarm FLUSH_SECONDS;
$out->blocking(1);
print {$out} $waiting, $part;
close($out);    # Waits for cat.
