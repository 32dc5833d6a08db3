// A model for promptfoo that answers from a table, with an error and a wrong answer.
const capitals = { France: 'Paris', Japan: 'Tokyo', Peru: 'Lima', Kenya: 'Nairobi' };

module.exports = class {
  constructor(options) {
    this.name = (options.config && options.config.name) || 'table';
  }

  id() {
    return `table:${this.name}`;
  }

  async callApi(prompt) {
    const country = Object.keys(capitals).find((name) => prompt.includes(name));
    if (country === 'Kenya' && this.name === 'small') {
      return { error: 'no answer for Kenya' };
    }
    const answer = country === 'Peru' && this.name === 'small' ? 'Cusco' : capitals[country];
    return { output: prompt.includes('briefly') ? answer : `It is ${answer}.`, cost: 0.001,
      tokenUsage: { prompt: 12, completion: 3, total: 15 } };
  }
};
