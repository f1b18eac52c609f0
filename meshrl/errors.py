"""The one error that says: the user can mend this, here is how."""


class UserError(ValueError):
    """Bad input: a wrong flag, file, row, name or size.

    The message names the bad value and the way out, in one or two sentences. The command line prints it alone
    and exits with 2; everything else that is raised is a failure of the run and exits with 1.
    """
