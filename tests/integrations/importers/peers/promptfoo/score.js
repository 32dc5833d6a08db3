// A score outside 0 to 1: the number of letters of the answer.
module.exports = (output) => ({ pass: output.length < 14, score: output.length, reason: `${output.length} letters` });
